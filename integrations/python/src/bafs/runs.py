"""Runs of workflows: `bafs run` as a process of its own, and what its journal tells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO, Any, Mapping, Optional, Sequence, Union

from .errors import BafsError, RunFailed, UsageError, error_from_exit
from .program import call_json, call_program, decode_json, find_program
from .records import HistoryEntry, JobLog, Progress

PathLike = Union[str, "os.PathLike[str]"]

#: Time for a cancelled run to stop its jobs and delete its volumes, in seconds.
CANCEL_TIMEOUT_S = 60.0


#: Runs a command until it ends or standard input closes, and then cancels it as Ctrl-C does. So a
#: run ends with the process that owns it, even by SIGKILL.
_OWNED = """
exec 3<&0
"$@" 3<&- </dev/null &
run=$!
{ read -r line <&3; kill -INT $run; } &
watcher=$!
exec 3<&-
wait $run
code=$?
kill $watcher
exit $code
"""


class WorkflowError(BafsError):
    """A workflow file has errors; the message lists them with line and column."""


def check(workflow: PathLike) -> Mapping[str, int]:
    """Counts jobs, volumes and extracts of a workflow file. Raises `WorkflowError`."""
    arguments = ["check", os.fspath(workflow)]
    try:
        answer = call_json(arguments)
    except UsageError:
        raise
    except BafsError as error:
        raise WorkflowError(_describe_findings(str(error))) from error
    return {name: answer[name] for name in ("extracts", "jobs", "volumes")}


def _describe_findings(answer: str) -> str:
    """The errors in what `bafs check --json` printed, a line each; other text as it is."""
    try:
        diagnostics = json.loads(answer)["diagnostics"]
    except (ValueError, KeyError, TypeError):
        return answer
    lines = []
    for it in diagnostics:
        hint = f"; {it['hint']}" if it["hint"] else ""
        lines.append(f"{it['file']}:{it['line']}:{it['column']}: {it['message']}{hint}")
    return "\n".join(lines)


class RunJournal:
    """Reads an active or ended run. It needs no cluster."""

    def __init__(self, journal: PathLike) -> None:
        #: The journal, or the workflow file if the journal is beside it.
        self.journal = Path(journal)

    def progress(self) -> Progress:
        """States of all jobs, and results at home."""
        return Progress.from_json(self.report())

    def status(self) -> Mapping[str, Any]:
        """Counts, nodes and running jobs, as `bafs status --json`."""
        status: Mapping[str, Any] = call_json(["status", os.fspath(self.journal)])
        return status

    def report(self) -> Mapping[str, Any]:
        """Everything that `bafs report` draws, as data."""
        report: Mapping[str, Any] = call_json(["report", os.fspath(self.journal)])
        return report

    def write_report(self, output: PathLike) -> None:
        """Writes the report as a page of HTML."""
        call_program(["report", os.fspath(self.journal), "--output", os.fspath(output)])

    def why(self, name: str) -> list[HistoryEntry]:
        """History of a job, volume or node, in order of time."""
        entries = call_json(["why", os.fspath(self.journal), name])
        return [HistoryEntry(e["at_ms"], e["subjects"], e["text"]) for e in entries]

    def logs(self, job: str, attempt: Optional[int] = None) -> JobLog:
        """What a job printed, in its last ended attempt unless `attempt` counts one from 1."""
        arguments = ["logs", os.fspath(self.journal), job]
        if attempt is not None:
            arguments += ["--attempt", str(attempt)]
        value = call_json(arguments)
        return JobLog(
            job=value["job"],
            attempt=value["attempt"],
            node=value["node"],
            outcome=value["outcome"],
            stdout=value["stdout"] or "",
            stderr=value["stderr"] or "",
        )

    def cancel_pipeline(self, job: str) -> None:
        """Cancels the pipeline of a job of an active run."""
        call_json(["cancel", os.fspath(self.journal), job])

    def prefer_pipeline(self, job: str, priority: int = 1) -> None:
        """Sets the priority of the pipeline of a job of an active run."""
        call_json(["prefer", os.fspath(self.journal), job, "--priority", str(priority)])


class Run(RunJournal):
    """An active `bafs run`, whose process this object owns."""

    def __init__(
        self, workflow: PathLike, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        path = os.fspath(workflow)
        super().__init__(f"{path}.journal")
        self._arguments = ["--json", "run", path, "--journal", f"{path}.journal", *options]
        # A session of its own: Ctrl-C at the terminal is for the program that owns the run.
        self._process = subprocess.Popen(
            ["sh", "-c", _OWNED, "sh", find_program(), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._texts: dict[str, str] = {}
        # Both pipes are read to their ends, so that the run never waits for this process.
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self._process.stdout), ("err", self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        self._texts[name] = stream.read()

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join()

    @property
    def is_active(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> Optional[int]:
        """Exit code of the ended process."""
        return self._process.poll()

    @property
    def messages(self) -> str:
        """Standard error of the ended process: warnings, and why it failed."""
        if self.is_active:
            return ""
        self._join_readers()
        return self._texts["err"].strip()

    def wait(self, timeout_s: Optional[float] = None) -> Mapping[str, Any]:
        """Waits for the end and returns the summary.

        Raises `RunFailed`, the exception of the exit code, or `subprocess.TimeoutExpired`.
        """
        code = self._process.wait(timeout_s)
        self.request_cancel()
        self._join_readers()
        out, messages = self._texts["out"], self._texts["err"]
        if not out.strip():
            raise error_from_exit(self._arguments, code, messages)
        summary: Mapping[str, Any] = decode_json(self._arguments, out)
        if code != 0:
            raise RunFailed(_describe_failure(summary["outcome"], messages), summary["outcome"])
        return summary

    def cancel(self, timeout_s: float = CANCEL_TIMEOUT_S) -> None:
        """Stops the jobs, deletes the volumes and ends the run, by force after the timeout."""
        self.request_cancel()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def request_cancel(self) -> None:
        """Asks the run to cancel, without waiting."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()


def _describe_failure(outcome: Any, messages: str) -> str:
    """Failed jobs with their reasons, then what the run printed."""
    failed = outcome.get("Failed", {}) if isinstance(outcome, dict) else {}
    lines = [f"job {job['name']}: {job['reason']}" for job in failed.get("jobs", ())]
    lines += [*failed.get("messages", ()), *messages.strip().splitlines()]
    return "\n".join(lines) or f"the run ended: {outcome}"
