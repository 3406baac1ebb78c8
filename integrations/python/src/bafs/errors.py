"""Errors of the program `bafs` as exceptions, chosen by exit code and error class.

No message is parsed. Where the program gives no class, the exception has none.
"""

from __future__ import annotations

import json
from typing import Mapping, Optional, Sequence

#: Exit codes of the program, as `bafs --help` lists them.
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_DOCTOR = 3
EXIT_ENVIRONMENT = 75
EXIT_HANGUP = 129
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

#: Class of each hundred of error numbers (docs/reference/errors.md).
_CLASSES: Mapping[int, str] = {
    1: "Transient",
    2: "VolumeLost",
    3: "Denied",
    4: "Invalid",
    5: "NoSpace",
}


class BafsError(Exception):
    """Base of all errors of this module."""


class ProgramNotFound(BafsError):
    """The program `bafs` is neither in BAFS_BIN, nor beside this Python, nor on PATH."""


class CommandFailed(BafsError):
    """A command of the program ended with an exit code other than 0."""

    def __init__(self, arguments: Sequence[str], exit_code: int, message: str) -> None:
        super().__init__(message or f"bafs {' '.join(arguments)}: exit code {exit_code}")
        #: Words of the command line, without the program.
        self.arguments = list(arguments)
        #: Exit code; negative for a signal.
        self.exit_code = exit_code
        #: Standard error of the command.
        self.message = message


class UsageError(CommandFailed):
    """The command line is wrong (exit code 2)."""


class EnvironmentFailed(CommandFailed):
    """BAFS could not provide what a job needs (exit code 75)."""

    def __init__(self, arguments: Sequence[str], exit_code: int, message: str) -> None:
        details = _last_json_object(message)
        detail = details.get("detail")
        super().__init__(arguments, exit_code, detail if isinstance(detail, str) else message)
        reason, number, volume = (details.get(key) for key in ("reason", "code", "volume"))
        #: Name of the error code, such as `VolumeLost`; none if the program gave none.
        self.reason: Optional[str] = reason if isinstance(reason, str) else None
        #: Number of the error code.
        self.code: Optional[int] = number if isinstance(number, int) else None
        #: Volume that caused it, if one did.
        self.volume: Optional[str] = volume if isinstance(volume, str) else None

    @property
    def error_class(self) -> Optional[str]:
        """`Transient`, `VolumeLost`, `Denied`, `Invalid` or `NoSpace`."""
        return None if self.code is None else _CLASSES.get(self.code // 100)


class Interrupted(CommandFailed):
    """A signal ended the command; a run with a journal can be resumed."""


class RunFailed(BafsError):
    """A workflow ended without all its results."""

    def __init__(self, message: str, outcome: object) -> None:
        super().__init__(message)
        #: Outcome of the run, as the program gives it.
        self.outcome = outcome


class AmbiguousVolume(BafsError):
    """Several volumes have the name; the id of one is needed."""


class VolumeNotFound(BafsError):
    """No live node has the volume."""


def error_from_exit(arguments: Sequence[str], exit_code: int, message: str) -> CommandFailed:
    """The exception for an exit code."""
    kinds: Mapping[int, type[CommandFailed]] = {
        EXIT_USAGE: UsageError,
        EXIT_ENVIRONMENT: EnvironmentFailed,
        EXIT_HANGUP: Interrupted,
        EXIT_INTERRUPTED: Interrupted,
        EXIT_TERMINATED: Interrupted,
    }
    kind = Interrupted if exit_code < 0 else kinds.get(exit_code, CommandFailed)
    return kind(arguments, exit_code, message.strip())


def _last_json_object(text: str) -> Mapping[str, object]:
    """The last line of the text that is a JSON object; warnings may stand around it."""
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}
