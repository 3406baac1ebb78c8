#!/bin/sh
# Checks the results in the directory $1 (default: this one): all 4,000 reads of four lanes are
# there, 99 of 100 first reads where prepare.sh took them from, and the index finds them.
set -eu
cd "${1:-.}"
fail() { echo "check: $*" >&2; exit 1; }

bam=results/all.bam
for file in $bam $bam.bai results/flagstat.txt; do
    [ -s $file ] || fail "$file is missing or empty"
done
samtools quickcheck $bam || fail "$bam is no whole BAM file"
grep -q '^4000 + 0 primary$' results/flagstat.txt || fail "not 4,000 reads in flagstat.txt"
lanes=$(samtools view -H $bam | grep -c '^@RG')
[ "$lanes" = 4 ] || fail "$bam has $lanes lanes, not 4"

# First reads of pairs, each once: its name is NAME:CHROMOSOME:POSITION.
first="samtools view -f 0x40 -F 0x900"
right=$($first $bam | awk '{ split($1, made, ":"); off = $4 - made[3] }
    $3 == made[2] && off >= -5 && off <= 5 { right++ } END { print right + 0 }')
[ "$right" -ge 1980 ] || fail "only $right of 2000 first reads are where they come from"

indexed=$($first -c $bam chr2:20001-30000)
scanned=$($first $bam | awk '$3 == "chr2" && $4 + 99 > 20000 && $4 <= 30000' | wc -l)
# Clipped reads may end earlier than their length says.
[ "$indexed" -gt 100 ] && [ $((scanned - indexed)) -le 3 ] && [ "$indexed" -le "$scanned" ] ||
    fail "the index finds $indexed reads of a region with $scanned"
echo "check: $right of 2000 first reads are where they come from"
