#!/bin/sh
# Makes a genome of two chromosomes and four lanes of 500 read pairs in the directory $1 (default:
# this one). A read's name tells where it is from, so the right answer is known.
set -eu
out=${1:-.}
mkdir -p "$out/reference"
for lane in 1 2 3 4; do mkdir -p "$out/lanes/lane$lane"; done

awk -v out="$out" '
# Park and Miller, 1988: the same numbers with every awk.
function random(bound) { seed = seed * 16807 % 2147483647; return seed % bound }
function base() { return substr("ACGT", 1 + random(4), 1) }
# The bases of a read, of which one in a hundred is wrong.
function sequence(text,    i, read) {
    read = ""
    for (i = 1; i <= length(text); i++)
        read = read (random(100) == 0 ? base() : substr(text, i, 1))
    return read
}
function reverse_complement(text,    i, other) {
    other = ""
    for (i = length(text); i > 0; i--)
        other = other substr("TGCA", index("ACGT", substr(text, i, 1)), 1)
    return other
}
function write_read(file, name, bases) {
    printf "@%s\n%s\n+\n%s\n", name, bases, quality > file
}
BEGIN {
    seed = 20262
    quality = sprintf("%100s", ""); gsub(/ /, "I", quality)
    for (chromosome = 1; chromosome <= 2; chromosome++) {
        genome[chromosome] = ""
        for (i = 0; i < 50000; i++) genome[chromosome] = genome[chromosome] base()
        printf ">chr%d\n%s\n", chromosome, genome[chromosome] > (out "/reference/genome.fa")
    }
    for (lane = 1; lane <= 4; lane++)
        for (pair = 1; pair <= 500; pair++) {
            chromosome = 1 + random(2)
            insert = 250 + random(101)
            start = 1 + random(50000 - insert)
            fragment = substr(genome[chromosome], start, insert)
            name = "l" lane "p" pair ":chr" chromosome ":" start
            directory = out "/lanes/lane" lane
            write_read(directory "/r1.fq", name, sequence(substr(fragment, 1, 100)))
            write_read(directory "/r2.fq", name, \
                sequence(reverse_complement(substr(fragment, insert - 99))))
        }
}'
bwa index "$out/reference/genome.fa" 2> "$out/reference/index.log"
