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

skip() {
    echo "SKIPPED: page: $1" >&2
    [ -n "${BAFS_SKIP_LOG:-}" ] && echo "SKIPPED: page: $1" >> "$BAFS_SKIP_LOG"
    # It counts as passed until the log is read.
    echo "test result: ok. 1 passed; 0 failed; 0 ignored"
    exit 0
}

find_program() {
    built=$checkout/target/debug/bafs
    if [ -n "${BAFS_BIN:-}" ]; then
        program=$BAFS_BIN
    elif [ -x "$built" ]; then
        program=$built
    else
        program=$(command -v bafs)
    fi
    if [ ! -x "$program" ]; then
        echo "no program bafs: build it, or set BAFS_BIN" >&2
        exit 2
    fi
    BAFS_BIN=$program
    export BAFS_BIN
}

make_environment() {
    python3 -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        skip "Python 3.10 or later with the module venv is missing"
    environment=${BAFS_PAGE_ENVIRONMENT:-$checkout/target/tools/page}
    [ -x "$environment/bin/python" ] || python3 -m venv "$environment" ||
        skip "a virtual environment cannot be made"
    stamp=$environment/requirements.txt
    if ! cmp -s "$here/requirements.txt" "$stamp"; then
        "$environment/bin/pip" install --quiet --disable-pip-version-check \
            --requirement "$here/requirements.txt" || skip "PyPI gives no packages"
        cp "$here/requirements.txt" "$stamp"
    fi
    PATH=$environment/bin:$PATH
    PYTHONPATH=$checkout/integrations/python/src
    export PATH PYTHONPATH
}

[ -e /dev/fuse ] || skip "there is no /dev/fuse"
find_program
make_environment
(cd "$checkout/integrations/python" && mypy --cache-dir=/dev/null) || exit 1
report=$(mktemp)
cd "$here" || exit 1
python -m pytest --quiet -p no:cacheprovider -rs --tb=short --import-mode=importlib \
    --junit-xml="$report" tests "$@"
code=$?
python - "$report" "${BAFS_SKIP_LOG:-}" "${BAFS_PAGE_RESULT:-}" <<'END'
import json
import sys
import xml.etree.ElementTree as tree
suite = tree.parse(sys.argv[1]).getroot().find("testsuite")
count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
failed = count["failures"] + count["errors"]
lines = [f"SKIPPED: page::{case.get('name')}: {case.find('skipped').get('message')}"
         for case in suite.iter("testcase") if case.find("skipped") is not None]
if sys.argv[2]:
    with open(sys.argv[2], "a") as log:
        log.writelines(line + "\n" for line in lines)
if sys.argv[3]:
    def count_outcomes(part):
        cases = [case for case in suite.iter("testcase")
                 if part in f"{case.get('classname')}.{case.get('name')}" and case.find("skipped") is None]
        bad = sum(1 for case in cases if case.find("failure") is not None or case.find("error") is not None)
        return len(cases) - bad, bad
    (passed, bad), (clean, found) = count_outcomes("test_page"), count_outcomes("test_fuzzer")
    figures = {"page_tests": passed, "page_failures": bad,
               "api_fuzz_failures": found if clean + found else None}
    with open(sys.argv[3], "w") as result:
        json.dump(figures, result)
# A skipped test counts as passed until the log is read.
print(f"test result: {'FAILED' if failed else 'ok'}. {count['tests'] - failed} passed; "
      f"{failed} failed; 0 ignored")
END
rm -f "$report"
[ "$code" -eq 0 ] || exit 1
