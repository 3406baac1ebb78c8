"""Builds workflow files (docs/reference/workflow.md). `bafs check` checks what they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Mapping, Optional, Sequence, Union

#: Bytes, or a size in the words of the workflow language, such as `1.5 GB` or `unknown`.
Size = Union[int, str]

#: Seconds, or a time in the words of the workflow language, such as `5 min`.
Duration = Union[int, float, str]


@dataclass(frozen=True)
class Mount:
    """A volume and its absolute path in a job; `mode` is `ro`, `rw` or `write-back`."""

    volume: str
    path: str
    mode: Optional[str] = None


@dataclass
class Job:
    """A program with its words. `cpus` counts slots; `runtime` is an estimate, no limit."""

    name: str
    executable: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Optional[str] = None
    cpus: int = 1
    memory: Optional[Size] = None
    runtime: Optional[Duration] = None
    priority: int = 0
    retry: int = 0
    output: Optional[str] = None
    error: Optional[str] = None
    share: Sequence[str] = ()
    mounts: Sequence[Mount] = ()
    after: Sequence[str] = ()


class Workflow:
    """A workflow file under construction. Statements appear in the order of the calls."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def scratch(
        self,
        name: str,
        size: Size,
        *,
        source: Optional[str] = None,
        files: Optional[int] = None,
        watched: bool = False,
        exact: bool = False,
    ) -> str:
        """Declares a scratch volume, filled from the URL `source`, and returns its name."""
        words = ["volume", _word(name), "scratch", _size(size)]
        if files is not None:
            words += ["files", str(files)]
        if watched:
            words.append("watched")
        if exact:
            words.append("exact")
        if source is not None:
            words += ["from", _word(source)]
        self._lines.append(" ".join(words))
        return name

    def cache(
        self,
        name: str,
        url: str,
        size: Size,
        *,
        files: Optional[int] = None,
        replacement: Optional[str] = None,
        warm: bool = False,
    ) -> str:
        """Declares a cache volume of the home path `url`, and returns its name."""
        words = ["volume", _word(name), "cache", _word(url), _size(size)]
        if replacement is not None:
            words.append(replacement)
        if warm:
            words.append("warm")
        if files is not None:
            words += ["files", str(files)]
        self._lines.append(" ".join(words))
        return name

    def add(self, job: Job) -> str:
        """Declares a job, its mounts and its parents, and returns its name."""
        name = _word(job.name)
        self._lines.append(f"job {name} {{")
        for key, value in _description(job):
            self._lines.append(f"  {key} = {value}")
        self._lines.append("}")
        for mount in job.mounts:
            words = ["mount", _word(mount.volume), name, _word(mount.path)]
            self._lines.append(" ".join(words + ([mount.mode] if mount.mode else [])))
        if job.after:
            parents = " ".join(_word(parent) for parent in job.after)
            self._lines.append(f"parent {parents} child {name}")
        return job.name

    def extract(self, volume: str, path: str, url: str) -> None:
        """Sends a file of a scratch volume home, when the volume's last writer has succeeded."""
        self._lines.append(f"extract {_word(volume)} {_word(path)} {_word(url)}")

    def text(self) -> str:
        """The text of the file."""
        return "\n".join(self._lines) + "\n"

    def write(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.text())


def _description(job: Job) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = [("executable", _word(job.executable))]
    if job.arguments:
        pairs.append(("arguments", " ".join(_word(word) for word in job.arguments)))
    if job.environment:
        variables = (_word(f"{name}={value}") for name, value in job.environment.items())
        pairs.append(("environment", " ".join(variables)))
    if job.directory is not None:
        pairs.append(("directory", _word(job.directory)))
    if job.cpus != 1:
        pairs.append(("request_cpus", str(job.cpus)))
    if job.memory is not None:
        pairs.append(("request_memory", _size(job.memory)))
    if job.runtime is not None:
        pairs.append(("runtime", _duration(job.runtime)))
    if job.priority:
        pairs.append(("priority", str(job.priority)))
    if job.retry:
        pairs.append(("retry", str(job.retry)))
    if job.output is not None:
        pairs.append(("output", _word(job.output)))
    if job.error is not None:
        pairs.append(("error", _word(job.error)))
    if job.share:
        pairs.append(("share", " ".join(job.share)))
    return pairs


def _word(text: str) -> str:
    """One word of a statement: quoted, as `$(` stands for a loop variable also inside quotes."""
    if "\n" in text or "\r" in text or "\0" in text:
        raise ValueError(f"a workflow file cannot hold a line break in a word: {text!r}")
    if text and all(c.isascii() and (c.isalnum() or c in "_-./:=,@%+") for c in text):
        return text
    return "'" + text.replace("$(", "$$(").replace("'", "'\\''") + "'"


def _size(size: Size) -> str:
    return f"{size} B" if isinstance(size, int) else size


def _duration(duration: Duration) -> str:
    return duration if isinstance(duration, str) else f"{duration:g} s"
