#!/bin/sh
# Makes a small protein database and sixteen queries in the directory $1 (default: this one).
# Query i is a mutated copy of record 20 i, so the right answer is known.
set -eu
out=${1:-.}
mkdir -p "$out/db" "$out/queries"

awk -v out="$out" '
# Park and Miller, 1988: the same numbers with every awk.
function random(bound) { seed = seed * 16807 % 2147483647; return seed % bound }
function residue() { return substr("ACDEFGHIKLMNPQRSTVWY", 1 + random(20), 1) }
BEGIN {
    seed = 20260
    for (record = 1; record <= 400; record++) {
        protein = ""
        for (i = 0; i < 300; i++) protein = protein residue()
        printf ">p%04d\n%s\n", record, protein > (out "/db/proteins.fa")
        if (record % 20 || record > 320) continue
        name = sprintf("q%02d", record / 20)
        query = ""
        for (i = 1; i <= 300; i++)
            query = query (random(100) < 20 ? residue() : substr(protein, i, 1))
        printf ">%s\n%s\n", name, query > (out "/queries/" name ".fa")
    }
}'
makeblastdb -dbtype prot -in "$out/db/proteins.fa" -out "$out/db/proteins" \
    > "$out/db/makeblastdb.log"
