#!/bin/sh
# Checks the results in the directory $1 (default: this one): generates the records again, without
# BAFS, and compares. Nothing is sorted: half of all keys are at most the median.
set -eu
cd "${1:-.}"
fail() { echo "check: $*" >&2; exit 1; }

[ -s results/summary.txt ] || fail "results/summary.txt is missing or empty"
[ "$(cut -d' ' -f1 results/summary.txt | tr '\n' ' ')" = "records smallest median largest mean " ] ||
    fail "results/summary.txt is not whole"
awk -f start/generate.awk start/seed.txt | awk '
FILENAME != "-" { found[$1] = $2; next }
{
    count++
    sum += $1
    if ($1 <= found["median"]) below++
    if (count == 1 || $1 < smallest) smallest = $1
    if ($1 > largest) largest = $1
}
function expect(what, right) {
    if (found[what] == right) return
    print what " is " found[what] ", not " right
    bad = 1
}
END {
    expect("records", count)
    expect("smallest", smallest)
    expect("largest", largest)
    expect("mean", sprintf("%.3f", sum / count))
    if (below != int((count + 1) / 2)) { print below " of " count " are up to the median"; bad = 1 }
    exit bad
}' results/summary.txt - >&2 || fail "results/summary.txt is wrong"
echo "check: the summary of $(sed -n 's/records //p' results/summary.txt) records is right"
