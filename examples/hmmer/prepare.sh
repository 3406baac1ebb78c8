#!/bin/sh
# Makes six alignments and four files of proteins in the directory $1 (default: this one).
# A protein's name tells its family, or `none`, so the right answer is known.
set -eu
out=${1:-.}
mkdir -p "$out/families" "$out/proteins"

awk -v out="$out" '
# Park and Miller, 1988: the same numbers with every awk.
function random(bound) { seed = seed * 16807 % 2147483647; return seed % bound }
function residue() { return substr("ACDEFGHIKLMNPQRSTVWY", 1 + random(20), 1) }
function protein(length_,    i, text) {
    text = ""
    for (i = 0; i < length_; i++) text = text residue()
    return text
}
function mutate(text, percent,    i, changed) {
    changed = ""
    for (i = 1; i <= length(text); i++)
        changed = changed (random(100) < percent ? residue() : substr(text, i, 1))
    return changed
}
BEGIN {
    seed = 20261
    for (family = 1; family <= 6; family++) {
        ancestor[family] = protein(120)
        file = out "/families/fam" family ".sto"
        print "# STOCKHOLM 1.0" > file
        for (member = 1; member <= 8; member++)
            printf "member%d %s\n", member, mutate(ancestor[family], 25) > file
        print "//" > file
    }
    for (number = 1; number <= 80; number++) {
        family = random(8) + 1
        core = family <= 6 ? mutate(ancestor[family], 25) : protein(120)
        printf ">p%03d-%s\n%s%s%s\n", number, family <= 6 ? "fam" family : "none", \
            protein(40), core, protein(40) > (out "/proteins/part" (1 + number % 4) ".fa")
    }
}'
