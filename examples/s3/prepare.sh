#!/bin/sh
# Makes in the directory $1 (default: this one) `program`, `buckets/noaa-ghcn-pds` (what the bucket
# of an S3 server holds), and `homes.toml` (how nodes reach it: at $S3_ENDPOINT, or else at AWS).
set -eu
here=$(dirname "$0")
out=${1:-.}
mkdir -p "$out/program"
cp "$here/means.awk" "$out/program/"
bucket="$out/buckets/noaa-ghcn-pds"
mkdir -p "$bucket/csv/by_year"

awk -v bucket="$bucket" '
# Park and Miller, 1988: the same numbers with every awk.
function random(bound) { seed = seed * 16807 % 2147483647; return seed % bound }
BEGIN {
    seed = 20265
    for (station = 1; station <= 20; station++) {
        id[station] = sprintf("XX%09d", station)
        printf "%s  %7.4f  %8.4f %6.1f    %-30s %15s\n", id[station], random(90), random(180), \
            random(1000), "STATION " station, "" > (bucket "/ghcnd-stations.txt")
    }
    for (year = 1821; year <= 1826; year++) {
        file = bucket "/csv/by_year/" year ".csv"
        print "ID,DATE,ELEMENT,DATA_VALUE,M_FLAG,Q_FLAG,S_FLAG,OBS_TIME" > file
        for (station = 1; station <= 20; station++)
            for (day = 1; day <= 28; day++) {
                date = sprintf("%d%02d%02d", year, 1 + random(12), day)
                lowest = random(300) - 100
                printf "%s,%s,TMIN,%d,,,E,\n", id[station], date, lowest > file
                printf "%s,%s,TMAX,%d,,,E,\n", id[station], date, lowest + random(200) > file
            }
    }
}'

# Nodes take a file of homes only if nobody else may read it.
umask 077
{
    printf '[[home]]\nurl = "s3://noaa-ghcn-pds"\nregion = "us-east-1"\n'
    [ -z "${S3_ENDPOINT:-}" ] || printf 'endpoint = "%s"\n' "$S3_ENDPOINT"
} > "$out/homes.toml"
