#!/bin/sh
# Puts the programs, a seed and a number of records into `start` of the directory $1 (default:
# this one).
set -eu
here=$(dirname "$0")
out=${1:-.}
mkdir -p "$out/start"
cp "$here/generate.awk" "$here/reduce.awk" "$out/start/"
echo "20264 1000000" > "$out/start/seed.txt"
