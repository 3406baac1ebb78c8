#!/bin/sh
# Tests the page in a real Chromium, the HTTP API, its Python client and the file system bafs://, on
# runs of a local cluster. Words after the options go to pytest.
#
#   BAFS_BIN                the program; default: target/debug/bafs of this checkout, then PATH
#   BAFS_PAGE_ENVIRONMENT   directory of the virtual environment; default: target/tools/page
#   BAFS_CHROMIUM           the browser; default: chromium on PATH
#   BAFS_SCREENSHOTS        directory that takes screenshots; default: none are made
#   BAFS_PAGE_RESULT        file that takes the figures of `cargo xtask bench service`
#   BAFS_SKIP_LOG           file that takes what was skipped
#
# The last line counts as those of cargo's tests do. Exit codes: 0 all tests that could run passed;
# 1 a test or a type check failed; 2 there is no program.
set -u

here=$(cd "$(dirname "$0")" && pwd)
checkout=$(dirname "$(dirname "$here")")

suite=page
. "$checkout/integrations/environment.sh"
[ -e /dev/fuse ] || skip "there is no /dev/fuse"
find_program
is_python python3 10 || skip "Python 3.10 or later with the module venv is missing"
make_environment "${BAFS_PAGE_ENVIRONMENT:-$checkout/target/tools/page}" python3 \
    "$here/requirements.txt" || skip "PyPI gives no packages (the reason is above)"
PYTHONPATH=$checkout/integrations/python/src
export PYTHONPATH
(cd "$checkout/integrations/python" && mypy --cache-dir=/dev/null) || exit 1
report=$(mktemp)
cd "$here" || exit 1
python -m pytest --quiet -p no:cacheprovider -rs --tb=short --import-mode=importlib \
    --junit-xml="$report" tests "$@"
code=$?
python "$checkout/integrations/summary.py" "$report" "$suite"
rm -f "$report"
[ "$code" -eq 0 ] || exit 1
