"""Answers of the program as typed records. Unknown keys are ignored, so that it may add some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence


@dataclass(frozen=True)
class Server:
    """A live server of the catalog; `kind` is `node` or `home`."""

    name: str
    kind: str
    address: str
    group: str
    slots: int
    jobs: int
    capacity_bytes: int
    free_bytes: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Server:
        """Reads one entry of `bafs servers --json`."""
        return cls(
            name=value["name"],
            kind=value["kind"],
            address=value["address"],
            group=value["group"],
            slots=value["slots"],
            jobs=value["jobs"],
            capacity_bytes=value["capacity_bytes"],
            free_bytes=value["free_bytes"],
        )


@dataclass(frozen=True)
class Volume:
    """A volume on a node; `kind` is `scratch` or `cache`, `state` is as `ready` or `lost`."""

    id: str
    name: str
    owner: str
    node: str
    kind: str
    state: str
    size_bytes: int
    used_bytes: int
    size_files: int
    used_files: int
    expires_ms: int
    error: Optional[str]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Volume:
        """Reads one entry of `bafs volume list --json`."""
        return cls(
            id=value["id"],
            name=value["name"],
            owner=value["owner"],
            node=value["node"],
            kind=value["kind"],
            state=value["state"],
            size_bytes=value["size_bytes"],
            used_bytes=value["used_bytes"],
            size_files=value["size_files"],
            used_files=value["used_files"],
            expires_ms=value["expires"],
            error=value["error"],
        )


@dataclass(frozen=True)
class Receipt:
    """Proof that a file is durable at home."""

    path: str
    size_bytes: int
    blake3: str


@dataclass(frozen=True)
class FileStatus:
    """A file or directory as a volume shows it; times are seconds since 1970."""

    is_directory: bool
    size_bytes: int
    modified: float


@dataclass(frozen=True)
class JobLog:
    """What one attempt of a job printed, as far as BAFS keeps it."""

    job: str
    attempt: int
    node: str
    outcome: str
    stdout: str
    stderr: str


@dataclass(frozen=True)
class HistoryEntry:
    """One event of a run, `at_ms` after its start."""

    at_ms: int
    subjects: Sequence[str]
    text: str


@dataclass(frozen=True)
class JobProgress:
    """State of a job (`waiting`, `running`, `done`, `failed`, …) and its last attempt."""

    name: str
    state: str
    attempts: int
    node: Optional[str]
    end_description: Optional[str]


@dataclass(frozen=True)
class Progress:
    """A run as its journal tells it. `delivered` holds the URLs of results that are at home."""

    is_ended: bool
    outcome: Any
    jobs: Mapping[str, JobProgress]
    delivered: frozenset[str]

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> Progress:
        """Reads `bafs report --json`."""
        timeline = report["timeline"]
        attempts: dict[int, list[Mapping[str, Any]]] = {}
        for execution in timeline["executions"]:
            attempts.setdefault(execution["job"], []).append(execution)
        jobs = {}
        for index, job in enumerate(timeline["jobs"]):
            tries = attempts.get(index, [])
            last = tries[-1] if tries else {}
            jobs[job["name"]] = JobProgress(
                name=job["name"],
                state=job["state"],
                attempts=len(tries),
                node=last.get("node"),
                end_description=last.get("end_description"),
            )
        delivered = (
            attempt["target"]
            for attempt in timeline["extract_attempts"]
            if attempt["ended_ms"] is not None and attempt["bytes"] is not None
        )
        outcome = timeline["outcome"]
        return cls(outcome is not None, outcome, jobs, frozenset(delivered))
