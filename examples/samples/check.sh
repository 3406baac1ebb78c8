#!/bin/sh
# Checks the results in the directory $1 (default: this one): the bases are counted here by `tr`.
set -eu
cd "${1:-.}"
fail() { echo "check: $*" >&2; exit 1; }

[ -s results/bases.csv ] || fail "results/bases.csv is missing or empty"
lines=$(wc -l < results/bases.csv)
[ "$lines" -eq 5 ] || fail "results/bases.csv has $lines lines instead of 5"
tail -n +2 samples.tsv | while read -r sample file group; do
    bases=$(awk 'NR % 4 == 2' "reads/$file" | tr -d '\n' | wc -c)
    gc=$(awk 'NR % 4 == 2' "reads/$file" | tr -cd 'GC' | wc -c)
    grep -qx "$sample,$group,$((bases)),$((gc))" results/bases.csv || fail "$sample is wrong"
done
echo "check: the bases of 4 samples are right"
