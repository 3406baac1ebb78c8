#!/bin/sh
# Puts the program and eight towns into `model` of the directory $1 (default: this one).
set -eu
here=$(dirname "$0")
out=${1:-.}
mkdir -p "$out/model"
cp "$here/sir.awk" "$out/model/"

awk '
# Park and Miller, 1988: the same numbers with every awk.
function random(bound) { seed = seed * 16807 % 2147483647; return seed % bound }
BEGIN {
    seed = 20263
    for (town = 1; town <= 8; town++) printf "town%d %.6f\n", town, (1 + random(1000)) / 1e5
}' > "$out/model/towns.txt"
