#!/bin/sh
# Checks the results in the directory $1 (default: this one): the best hit of query i must be
# record 20 i, from which prepare.sh made it.
set -eu
cd "${1:-.}"
fail() { echo "check: $*" >&2; exit 1; }

for i in $(seq 1 16); do
    query=$(printf 'q%02d' "$i")
    [ -s "results/$query.txt" ] || fail "results/$query.txt is missing or empty"
    best=$(head -n 1 "results/$query.txt" | cut -d' ' -f1,2)
    expected=$(printf '%s p%04d' "$query" $((20 * i)))
    [ "$best" = "$expected" ] || fail "the best hit of $query is '$best', not '$expected'"
done
echo "check: 16 best hits are right"
