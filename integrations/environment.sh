# What the scripts of the integrations share: the program and the Python environment that they test.
# To be read by `.`; `checkout` is the root of the checkout, `suite` the name of the tests.

# skip REASON: the whole suite cannot run. The script ends with code 0, and the reason is in the log.
skip() {
    echo "SKIPPED: $suite: $1" >&2
    [ -n "${BAFS_SKIP_LOG:-}" ] && echo "SKIPPED: $suite: $1" >> "$BAFS_SKIP_LOG"
    # It counts as passed until the log is read.
    echo "test result: ok. 1 passed; 0 failed; 0 ignored"
    exit 0
}

# Sets BAFS_BIN to the program; without one, the script ends with code 2.
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

# is_python PROGRAM MINOR: whether it is Python 3.MINOR or later and has the module venv.
is_python() {
    "$1" -c "import sys, venv; sys.exit(sys.version_info < (3, $2))" 2>/dev/null
}

# make_environment DIR PYTHON REQUIREMENTS: a virtual environment with these packages, first on
# PATH. One that has them stays as it is. It fails where PyPI gives nothing.
make_environment() {
    [ -x "$1/bin/python" ] || "$2" -m venv "$1" || return 1
    if ! cmp -s "$3" "$1/requirements.txt"; then
        "$1/bin/pip" install --quiet --disable-pip-version-check --requirement "$3" || return 1
        cp "$3" "$1/requirements.txt"
    fi
    PATH=$1/bin:$PATH
    export PATH
}
