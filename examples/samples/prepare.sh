#!/bin/sh
# Puts four small FASTQ files and their sample sheet into the directory $1 (default: this one).
set -eu
out=${1:-.}
mkdir -p "$out/reads"
printf 'sample\tfile\tgroup\n' > "$out/samples.tsv"
for number in 1 2 3 4; do
    name=$(printf 'S%02d' "$number")
    group=$([ "$number" -le 2 ] && echo control || echo treated)
    printf '%s\t%s_1.fq\t%s\n' "$name" "$name" "$group" >> "$out/samples.tsv"
    awk -v seed="$number" '
    # Park and Miller, 1988: the same numbers with every awk.
    function random(bound) { seed = seed * 16807 % 2147483647; return seed % bound }
    BEGIN {
        for (read = 1; read <= 50; read++) {
            bases = ""; quality = ""
            for (i = 1; i <= 40 + random(20); i++) {
                bases = bases substr("ACGT", 1 + random(4), 1); quality = quality "I"
            }
            printf "@read%d\n%s\n+\n%s\n", read, bases, quality
        }
    }' > "$out/reads/${name}_1.fq"
done
