"""Finds the program `bafs` and calls it. No other file of this module starts it for an answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from typing import Any, Mapping, Optional, Sequence

from .errors import BafsError, ProgramNotFound, error_from_exit

#: Variable that names the program.
PROGRAM_VARIABLE = "BAFS_BIN"


def find_program() -> str:
    """Path of the program: `BAFS_BIN`, else beside this Python (from the wheel), else `PATH`.

    Raises `ProgramNotFound`.
    """
    named = os.environ.get(PROGRAM_VARIABLE)
    beside = os.path.join(sysconfig.get_path("scripts"), "bafs")
    for path in (named, beside, shutil.which("bafs")):
        if path and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
        if path is named and named:
            raise ProgramNotFound(f"{PROGRAM_VARIABLE} is {named!r}, which is no program")
    raise ProgramNotFound(
        f"no program 'bafs': install the package bafs, or set PATH or {PROGRAM_VARIABLE}"
    )


def call_program(
    arguments: Sequence[str],
    *,
    environment: Optional[Mapping[str, str]] = None,
    timeout_s: Optional[float] = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with `environment` added to that of this process.

    Raises the exception of its exit code, `ProgramNotFound`, or `subprocess.TimeoutExpired`.
    """
    done = subprocess.run(
        [find_program(), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **(environment or {})},
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise error_from_exit(arguments, done.returncode, done.stderr or done.stdout)
    return done


def call_json(
    arguments: Sequence[str],
    *,
    environment: Optional[Mapping[str, str]] = None,
    timeout_s: Optional[float] = None,
) -> Any:
    """Runs a command with `--json` and returns its answer. Raises as `call_program`."""
    words = ["--json", *arguments]
    done = call_program(words, environment=environment, timeout_s=timeout_s)
    return decode_json(words, done.stdout)


def decode_json(arguments: Sequence[str], text: str) -> Any:
    """The JSON answer of a command. Raises `BafsError` if it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise BafsError(f"bafs {' '.join(arguments)}: the answer is no JSON: {error}") from error
