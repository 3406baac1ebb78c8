#!/bin/sh
# Tests the Python module and its plug-ins on local clusters of four nodes: types, the suites of
# Snakemake's interfaces, complete workflows. Words after the options go to pytest. After the word
# --bench it runs bench.py instead, with the other words.
#
#   BAFS_BIN                 the program; default: target/debug/bafs of this checkout, then PATH
#   BAFS_PYTHON_ENVIRONMENT  directory of the virtual environment; default: target/tools/python
#   BAFS_SNAKEMAKE_JOBS      small jobs of one workflow; default: 40
#   BAFS_SKIP_LOG            file that takes what was skipped
#
# The last line counts as those of cargo's tests do. Exit codes: 0 all tests that could run passed;
# 1 a test or a type check failed; 2 there is no program.
set -u

here=$(cd "$(dirname "$0")" && pwd)
integrations=$(dirname "$here")
checkout=$(dirname "$integrations")
suite=integrations
. "$integrations/environment.sh"

find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        is_python "$python" 11 && return
    done
    skip "Snakemake needs Python 3.11 or later, with the module venv"
}

prepare_environment() {
    environment=${BAFS_PYTHON_ENVIRONMENT:-$checkout/target/tools/python}
    make_environment "$environment" "$python" "$here/requirements.txt" ||
        skip "PyPI gives no packages (the reason is above)"
    # Without these, the tests of other formats say that they are skipped.
    "$environment/bin/pip" install --quiet --disable-pip-version-check \
        --requirement "$here/requirements-formats.txt" || :
    site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for package in python snakemake-executor-plugin-bafs snakemake-storage-plugin-bafs; do
        echo "$integrations/$package/src"
    done > "$site/bafs-integrations.pth"
}

check_types() {
    for package in python snakemake-executor-plugin-bafs snakemake-storage-plugin-bafs; do
        (cd "$integrations/$package" && mypy --cache-dir=/dev/null) || exit 1
    done
}

[ -e /dev/fuse ] || skip "there is no /dev/fuse"
find_program
find_python
prepare_environment
if [ "${1:-}" = --bench ]; then
    shift
    exec "$environment/bin/python" "$here/bench.py" "$@"
fi
check_types
report=$(mktemp)
cd "$integrations" || exit 1
python -m pytest --quiet -p no:cacheprovider -rs --tb=short --junit-xml="$report" "$@"
code=$?
python "$integrations/summary.py" "$report" "$suite"
rm -f "$report"
[ "$code" -eq 0 ] || exit 1
