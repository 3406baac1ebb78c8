"""A batch: jobs that became ready together, as one BAFS workflow and one `bafs run`.

Jobs of a batch share the cache of their common inputs, and BAFS queues them.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Mapping, Optional, Sequence

import bafs

from . import staging
from .staging import Pool, Root

#: A failed job's archive of logs is on its way home for at most so long (as BAFS tries it).
ARCHIVE_TIMEOUT_S = 60.0

#: Lines of a failed job's standard error in its message.
ERROR_LINES = 20

#: Space for what Snakemake itself writes in a job's volume: its own directory and metadata.
OWN_BYTES = 16 << 20

#: Files of a cache beyond those that are staged: directories, and what other batches add.
FILES_MARGIN = 1024

#: The job's own directory below the working directory.
OWN_DIRECTORY = Path(".snakemake") / "bafs-job"

#: Where a job sees stored inputs, each in a directory of its own.
STORED_INPUTS = "/tmp/bafs-stored"

#: Variable by which the storage plug-in of BAFS finds the stored files of a job.
JOB_MAP_VARIABLE = "SNAKEMAKE_STORAGE_BAFS_FILES"


@dataclass
class JobPlan:
    """What BAFS has to know of a job. Paths are relative to the root.

    `copies` are files that the job changes in place: they are in its volume themselves.
    Stored files are URLs of homes that the storage plug-in of BAFS handles; inputs with their
    sizes in bytes.
    """

    name: str
    command: str
    cpus: int
    scratch_bytes: int
    memory_bytes: Optional[int] = None
    runtime_s: Optional[float] = None
    priority: int = 0
    inputs: Sequence[Path] = ()
    copies: Sequence[Path] = ()
    files: Sequence[Path] = ()
    directories: Sequence[Path] = ()
    logs: Sequence[Path] = ()
    stored_inputs: Mapping[str, int] = field(default_factory=dict)
    stored_outputs: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Verdict(Enum):
    """State of a job as Snakemake needs it."""

    ACTIVE = 0
    DONE = 1
    FAILED = 2


class Batch:
    """A submitted batch."""

    def __init__(
        self,
        name: str,
        root: Root,
        pool: Pool,
        runs: Path,
        cluster: bafs.Cluster,
        url: str,
        python: str,
    ) -> None:
        #: Name of the batch, part of the ids that Snakemake shows.
        self.name = name
        self._root = root
        self._pool = pool
        self._home = pool.directory.parent / name
        self._pool_url = f"{url}/{pool.directory.name}"
        self._url = f"{url}/{name}"
        self._directory = runs / name
        self._cluster = cluster
        self._python = python
        self._run: Optional[bafs.Run] = None
        self._targets: dict[str, dict[Path, str]] = {}
        self._archives: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        self._stored_targets: dict[str, set[str]] = {}
        self._failed_at: dict[str, float] = {}
        self._progress: Optional[bafs.Progress] = None
        self._journal_size = -1
        self._is_over = False
        self._reason = ""
        self._acquired: set[Path] = set()
        self._open: set[str] = set()

    @property
    def workflow_path(self) -> Path:
        """The workflow file; its journal and logs are beside it."""
        return self._directory / "workflow.bafs"

    def submit(
        self,
        plans: Sequence[JobPlan],
        sources: Sequence[Path],
        cache_bytes_max: int,
        resource_timeout: str,
    ) -> None:
        """Stages the files, writes the workflow, and starts the run."""
        self._open = {plan.name for plan in plans}
        wanted = {path for plan in plans for path in plan.inputs}
        self._acquired = self._pool.acquire(wanted.union(sources))
        workflow = bafs.Workflow()
        # A tenth more than the source, as the workflow language advises; the cache evicts the
        # rest where it does not fit. Other batches may add files before the listing.
        size = self._pool.bytes_of(self._acquired) * 11 // 10 + staging.BLOCK_BYTES
        files = 2 * self._pool.count() + FILES_MARGIN
        workflow.cache("inputs", self._pool_url, min(size, cache_bytes_max), files=files)
        stored = {url: size for plan in plans for url, size in plan.stored_inputs.items()}
        for number, (url, size) in enumerate(stored.items()):
            self._stored[url] = f"stored-{number}"
            blocks = -(-size // staging.BLOCK_BYTES) + 1
            workflow.cache(self._stored[url], url, blocks * staging.BLOCK_BYTES)
        for plan in plans:
            tree = self._home / "jobs" / plan.name
            staging.link_inputs(self._root, {*plan.inputs, *sources}, tree)
            self._add_job(workflow, plan, tree)
        self._directory.mkdir(parents=True)
        workflow.write(self.workflow_path)
        self._run = self._cluster.start(self.workflow_path, resource_timeout=resource_timeout)

    def _add_job(self, workflow: bafs.Workflow, plan: JobPlan, tree: Path) -> None:
        root, name = self._root, plan.name
        own = root.workdir / OWN_DIRECTORY
        self._write_own_files(plan, tree / own.relative_to(root.path))
        # Programs expect the directories of their outputs and logs, as Snakemake makes them.
        for path in (*plan.files, *plan.directories, *plan.logs):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
        for path in plan.copies:
            shutil.copy2(root.absolute(path), tree / path)
        volume = f"work-{name}"
        size = staging.disk_bytes(tree) + plan.scratch_bytes + OWN_BYTES
        workflow.scratch(volume, size, source=f"{self._url}/jobs/{name}")
        mounts = [bafs.Mount(volume, str(root.path)), bafs.Mount("inputs", staging.INPUTS)]
        for url in plan.stored_inputs:
            mounts.append(bafs.Mount(self._stored[url], self._stored_directory(url)))
        environment = dict(plan.environment)
        if plan.stored_inputs or plan.stored_outputs:
            environment[JOB_MAP_VARIABLE] = str(own / "stored.json")
        archive = own / "archive.tar"
        workflow.add(
            bafs.Job(
                name=name,
                executable=self._python,
                arguments=[str(own / "job.py")],
                environment=environment,
                directory=str(root.workdir),
                cpus=plan.cpus,
                memory=plan.memory_bytes,
                runtime=plan.runtime_s,
                priority=plan.priority,
                output=str(archive),
                mounts=mounts,
            )
        )
        out = f"{self._url}/out/{name}"
        self._archives[name] = f"{out}.tar"
        workflow.extract(volume, str(archive.relative_to(root.path)), self._archives[name])
        self._targets[name] = {path: f"{out}/{path}" for path in plan.files}
        for path, url in self._targets[name].items():
            workflow.extract(volume, str(path), url)
        self._stored_targets[name] = set(plan.stored_outputs)
        for number, url in enumerate(plan.stored_outputs):
            path = self._stored_output(number, url).relative_to(root.path)
            workflow.extract(volume, str(path), url)

    def _write_own_files(self, plan: JobPlan, place: Path) -> None:
        """Writes what the job's own program and the storage plug-in read."""
        root = self._root
        place.mkdir(parents=True)
        outputs = {
            url: str(self._stored_output(number, url))
            for number, url in enumerate(plan.stored_outputs)
        }
        spec = {
            "command": plan.command,
            "root": str(root.path),
            "logs": [str(root.absolute(path)) for path in plan.logs],
            "directories": [str(root.absolute(path)) for path in plan.directories],
            "outputs": [str(root.absolute(path)) for path in plan.files],
            "stored": list(outputs.values()),
        }
        (place / "job.json").write_text(json.dumps(spec), encoding="utf-8")
        shutil.copy(Path(__file__).with_name("node_job.py"), place / "job.py")
        inputs = {
            url: f"{self._stored_directory(url)}/{url.rsplit('/', 1)[1]}"
            for url in plan.stored_inputs
        }
        stored = {"inputs": inputs, "outputs": outputs}
        (place / "stored.json").write_text(json.dumps(stored), encoding="utf-8")
        self._pool.own_bytes += sum(file.stat().st_size for file in place.iterdir())

    def _stored_directory(self, url: str) -> str:
        return f"{STORED_INPUTS}/{self._stored[url]}"

    def _stored_output(self, number: int, url: str) -> Path:
        directory = self._root.workdir / OWN_DIRECTORY / "stored" / str(number)
        return directory / url.rsplit("/", 1)[1]

    def refresh(self) -> None:
        """Reads the journal, if it has grown."""
        assert self._run is not None
        # In this order: what the run wrote before its end is read after it.
        self._is_over = not self._run.is_active
        journal = self._run.journal
        size = journal.stat().st_size if journal.exists() else -1
        if size == self._journal_size:
            return
        try:
            self._progress = self._run.progress()
            self._journal_size = size
        except bafs.BafsError as error:
            # The first events may not be there yet; at the end, this is why nothing is known.
            self._reason = str(error)

    def verdict(self, name: str) -> Verdict:
        """State of a job by the last refresh."""
        job = self._progress.jobs.get(name) if self._progress is not None else None
        if job is not None and self._progress is not None:
            delivered = self._progress.delivered
            has_archive = self._archives[name] in delivered
            if job.state == "done" and has_archive:
                targets = {*self._targets[name].values(), *self._stored_targets[name]}
                if delivered.issuperset(targets):
                    return Verdict.DONE
            if job.state in ("failed", "skipped"):
                since = self._failed_at.setdefault(name, time.monotonic())
                if has_archive or time.monotonic() - since > ARCHIVE_TIMEOUT_S:
                    return Verdict.FAILED
        return Verdict.FAILED if self._is_over else Verdict.ACTIVE

    def take_results(self, name: str) -> list[Path]:
        """Moves the outputs of a job into place and unpacks its archive; returns the outputs."""
        self.take_archive(name)
        for path in self._targets[name]:
            staging.take_file(self._home / "out" / name / path, self._root.absolute(path))
        self._close(name)
        return list(self._targets[name])

    def _close(self, name: str) -> None:
        """Notes that a job is over; with the last one, the batch needs no staged files."""
        self._open.discard(name)
        if not self._open:
            self._discard_files()

    def _discard_files(self) -> None:
        self._pool.release(self._acquired)
        self._acquired = set()
        shutil.rmtree(self._home, ignore_errors=True)

    def take_archive(self, name: str) -> None:
        """Unpacks the logs, benchmarks and directories of a job, if they arrived."""
        archive = self._home / "out" / f"{name}.tar"
        if not archive.exists() or archive.stat().st_size == 0:
            return
        with tarfile.open(archive) as file:
            # Whole directories replace those of an earlier attempt.
            for member in file.getmembers():
                place = self._root.path / member.name
                if member.isdir() and place.is_dir() and not place.is_symlink():
                    shutil.rmtree(place)
            file.extractall(self._root.path, filter="tar")
        archive.unlink()

    def take_failure(self, name: str) -> tuple[str, Optional[Path]]:
        """Why a job failed, and the file with its standard error. Unpacks its archive."""
        assert self._run is not None
        self.take_archive(name)
        self._close(name)
        job = self._progress.jobs.get(name) if self._progress is not None else None
        if job is None or job.attempts == 0:
            reason = self._run.messages if self._is_over else ""
            return f"BAFS did not run job {name}: {reason or self._reason}", None
        lines = [f"BAFS job {name} on node {job.node}: {job.end_description or job.state}"]
        log = None
        try:
            printed = self._run.logs(name)
            lines += printed.stderr.rstrip().splitlines()[-ERROR_LINES:]
            path = self.workflow_path.with_name("workflow.bafs.logs")
            log = path / f"{name}.{printed.attempt}.err"
        except bafs.BafsError as error:
            lines.append(f"its output is not known: {error}")
        if job.state == "done" and self._is_over:
            lines.append(f"its results are not at home: {self._run.messages}")
        lines.append(f"`bafs why {self.workflow_path} {name}` prints its history. ")
        return "\n".join(lines), log if log is not None and log.exists() else None

    def request_cancel(self) -> None:
        """Asks the whole run to end."""
        if self._run is not None:
            self._run.request_cancel()

    @property
    def is_over(self) -> bool:
        """Whether all its jobs are reported and its run has ended."""
        return not self._open and self._run is not None and not self._run.is_active

    def end(self) -> None:
        """Ends the run, if it still is active, and removes the staged files."""
        if self._run is not None:
            self._run.cancel()
        self._discard_files()
