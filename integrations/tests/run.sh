#!/bin/sh
# Tests the Python module and its plug-ins on local clusters of four nodes.
#
# It makes a virtual environment from PyPI, checks types, and runs all tests. Words after the
# options go to pytest.
#
#   BAFS_BIN                 the program; default: target/debug/bafs of this checkout, then PATH
#   BAFS_PYTHON_ENVIRONMENT  directory of the virtual environment, kept; default: a temporary one
#   BAFS_SNAKEMAKE_JOBS      small jobs of one workflow; default: 40
#
# Exit codes: 0 all tests that could run passed; 1 a test or a type check failed; 2 there is no
# program; 77 nothing could run. What was skipped is listed at the end, after SKIPPED.
set -u

here=$(cd "$(dirname "$0")" && pwd)
integrations=$(dirname "$here")
temporary=
skipped=

finish() {
    [ -n "$temporary" ] && rm -rf "$temporary"
    [ -n "$skipped" ] && printf 'SKIPPED: %s\n' "$skipped"
    exit "$1"
}

find_program() {
    built=$(dirname "$integrations")/target/debug/bafs
    if [ -n "${BAFS_BIN:-}" ]; then
        program=$BAFS_BIN
    elif [ -x "$built" ]; then
        program=$built
    else
        program=$(command -v bafs)
    fi
    if [ ! -x "$program" ]; then
        echo "no program bafs: build it, or set BAFS_BIN" >&2
        finish 2
    fi
    BAFS_BIN=$program
    export BAFS_BIN
}

find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            return
        fi
    done
    skipped="everything: Snakemake needs Python 3.11 or later, with the module venv"
    finish 77
}

make_environment() {
    environment=${BAFS_PYTHON_ENVIRONMENT:-}
    if [ -z "$environment" ]; then
        temporary=$(mktemp -d)
        environment=$temporary/venv
    fi
    [ -x "$environment/bin/python" ] || "$python" -m venv "$environment" || finish 1
    if ! "$environment/bin/pip" install --quiet --disable-pip-version-check \
        --requirement "$here/requirements.txt"; then
        skipped="everything: PyPI gives no packages (the reason is above)"
        finish 77
    fi
    # Without these, the tests of other formats say that they are skipped.
    "$environment/bin/pip" install --quiet --disable-pip-version-check \
        --requirement "$here/requirements-formats.txt" || :
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for package in python snakemake-executor-plugin-bafs snakemake-storage-plugin-bafs; do
        echo "$integrations/$package/src"
    done > "$site/bafs-integrations.pth"
    PATH=$environment/bin:$PATH
    export PATH
}

check_types() {
    for package in python snakemake-executor-plugin-bafs snakemake-storage-plugin-bafs; do
        (cd "$integrations/$package" && mypy --cache-dir=/dev/null) || finish 1
    done
}

find_program
find_python
make_environment
check_types
[ -e /dev/fuse ] || {
    skipped="all tests with jobs: there is no /dev/fuse"
    finish 77
}
report=$(mktemp)
cd "$integrations" || finish 1
python -m pytest --quiet -p no:cacheprovider -rs --tb=short "$@" > "$report" 2>&1
code=$?
cat "$report"
skipped=$(grep '^SKIPPED' "$report" | sed 's/^SKIPPED //')
rm -f "$report"
[ "$code" -eq 0 ] || finish 1
finish 0
