#!/bin/sh
# Checks the results in the directory $1 (default: this one) against the files below `buckets`.
set -eu
cd "${1:-.}"
fail() { echo "check: $*" >&2; exit 1; }

[ -s results/means.csv ] || fail "results/means.csv is missing or empty"
{
    echo year,station,days,mean,name
    for year in $(seq 1821 1826); do
        for number in $(seq 1 20); do
            id=$(printf 'XX%09d' "$number")
            grep "^$id,.*,TMAX," "buckets/noaa-ghcn-pds/csv/by_year/$year.csv" |
                awk -F, -v label="$year,$id" -v name="STATION $number" '
                    { sum += $4 / 10 } END { printf "%s,%d,%.2f,%s\n", label, NR, sum / NR, name }'
        done
    done
} > expected.csv
diff expected.csv results/means.csv >&2 || fail "the means are other ones (< expected, > found)"
rm expected.csv
echo "check: 120 means are right"
