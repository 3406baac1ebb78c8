#!/bin/sh
# Checks the results in the directory $1 (default: this one). How many are ever infected (z) is
# known without a simulation (Kermack and McKendrick, 1927): 1 - z = s exp(-z beta / gamma), where
# s is the share that is susceptible at first. The formula says nothing of the peak day.
set -eu
cd "${1:-.}"
fail() { echo "check: $*" >&2; exit 1; }

[ -s results/sweep.csv ] || fail "results/sweep.csv is missing or empty"
awk -F'[, ]' '
FILENAME == "model/towns.txt" { start[$1] = $2; next }
FNR == 1 { next }
{
    z = 1
    for (i = 0; i < 2000; i++) z = 1 - (1 - start[$3]) * exp(-z * $1 / $2)
    off = z - $4
    if (off > 0.001 || off < -0.001) { print "line " FNR ": " $0 ", but " z " is right"; bad = 1 }
    if (seen[$1, $2, $3]++) { print "line " FNR " is there twice"; bad = 1 }
    lines++
}
END {
    if (lines != 160) { print lines + 0 " lines instead of 5 x 4 x 8 = 160"; bad = 1 }
    exit bad
}' model/towns.txt results/sweep.csv >&2 || fail "results/sweep.csv is wrong"
echo "check: 160 simulations agree with the formula"
