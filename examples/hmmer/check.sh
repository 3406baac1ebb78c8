#!/bin/sh
# Checks the results in the directory $1 (default: this one): each protein that prepare.sh made
# from a family is annotated with this family alone, each other protein with none.
set -eu
cd "${1:-.}"
fail() { echo "check: $*" >&2; exit 1; }

[ -s results/annotation.txt ] || fail "results/annotation.txt is missing or empty"
cat proteins/part*.fa | sed -n 's/^>\(.*-\(fam.*\)\)$/\1 \2/p' | LC_ALL=C sort > expected.txt
cut -d' ' -f1,2 results/annotation.txt | LC_ALL=C sort > found.txt
diff expected.txt found.txt >&2 || fail "the annotation is another one (< expected, > found)"
echo "check: $(wc -l < found.txt) proteins have the right family"
rm expected.txt found.txt
