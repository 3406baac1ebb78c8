"""Snakemake executor for BAFS: runs jobs on the nodes of a cluster, without a shared file system.

The module `bafs` is the only way to the cluster. docs/guide/snakemake.md explains the design.
"""

# No `from __future__ import annotations`: Snakemake reads the types of the settings as types.

import glob
import json
import os
import re
import shutil
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, AsyncGenerator, Iterable, List, Optional

import bafs
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from .batch import Batch, JobPlan, Verdict
from .staging import Pool, Root

#: Time between two readings of a journal, a local file that is read only if it has grown.
POLL_S = 0.5

#: Space of a job's volume if the job has no `disk_mb`: the least that Snakemake sets by default.
SCRATCH_BYTES_DEFAULT = 1_000_000_000

#: Most space of a cache if no node is alive yet.
CACHE_BYTES_DEFAULT = 10_000_000_000

#: `mem_mb` is for the rule. The Snakemake process that runs it on the node needs this besides:
#: Snakemake 9 has 78 MB with one rule, and more with large workflows.
SNAKEMAKE_MEMORY_BYTES = 500_000_000

#: Module of the storage plug-in whose files BAFS mounts and sends itself.
STORAGE_MODULE = "snakemake_storage_plugin_bafs"

#: Flags of outputs that never leave the job.
LOCAL_FLAGS = ("pipe", "service", "nodelocal")


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """Options of the command line, with the prefix `--bafs-`."""

    identity: Optional[str] = field(
        default=None,
        metadata={"help": "Directory that `bafs init` created. Defaults to BAFS_IDENTITY."},
    )
    catalog: Optional[str] = field(
        default=None,
        metadata={"help": "Address of the catalog, HOST:PORT. Defaults to BAFS_CATALOG."},
    )
    listen: Optional[str] = field(
        default=None,
        metadata={
            "help": "Address of this machine at which the nodes reach it, HOST:PORT. Defaults "
            "to the address that leads to the catalog, and any free port."
        },
    )
    root: Optional[str] = field(
        default=None,
        metadata={
            "help": "Directory at or above the working directory. Its files travel to the "
            "jobs, if they are inputs or sources. Defaults to the working directory."
        },
    )
    python: str = field(
        default="python",
        metadata={"help": "Python with Snakemake on the nodes."},
    )
    sources: Optional[str] = field(
        default=None,
        metadata={
            "help": "Files and directories that jobs read without naming them as input, as "
            "patterns such as `data/genome.fa.*`, separated by spaces. Snakefiles, scripts, "
            "configuration and files that git tracks are sent in any case."
        },
    )
    resource_timeout: str = field(
        default="1h",
        metadata={"help": "Time after which jobs fail for lack of nodes, space or network."},
    )


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=True,
    job_deploy_sources=True,
    can_transfer_local_files=True,
    # The nodes have Snakemake; installing plug-ins by pip in each job would cost more than it.
    auto_deploy_default_storage_provider=False,
)


class Executor(RemoteExecutor):
    """Submits jobs in batches, and follows them by the journals of the batches."""

    def __post_init__(self) -> None:
        settings = self.workflow.executor_settings or ExecutorSettings()
        self._settings = settings
        try:
            self._cluster = bafs.Cluster(settings.identity, settings.catalog)
            nodes = self._cluster.nodes()
        except bafs.BafsError as error:
            raise WorkflowError(f"BAFS: {error}") from error
        self._slots_max = max((node.slots for node in nodes), default=0)
        # The other half is for the volumes of the jobs. Nodes that come later bring more.
        capacity = sum(node.capacity_bytes for node in nodes)
        self._cache_bytes_max = capacity // 2 if capacity else CACHE_BYTES_DEFAULT
        workdir = Path.cwd()
        root = Path(settings.root).resolve() if settings.root else workdir
        if not workdir.is_relative_to(root):
            raise WorkflowError(f"--bafs-root {root} is not at or above {workdir}")
        self._root = Root(root, workdir)
        directory = workdir / ".snakemake" / "bafs"
        self._export = directory / "home"
        self._runs = directory / "runs"
        shutil.rmtree(self._export, ignore_errors=True)
        self._export.mkdir(parents=True, mode=0o700)
        self._pool = Pool(self._root, self._export / "files")
        self._stamp = time.strftime("%Y%m%d-%H%M%S")
        self._home: Optional[bafs.HomeServer] = None
        self._batches: list[Batch] = []
        self._batch_count = 0
        self._sources: Optional[list[Path]] = None
        self._strangers: set[str] = set()
        self.next_seconds_between_status_checks = POLL_S

    def get_python_executable(self) -> str:
        """Python of the nodes."""
        return self._settings.python

    # Submission

    def run_jobs(self, jobs: List[JobExecutorInterface]) -> None:
        """Submits jobs that became ready together as one batch."""
        for job in jobs:
            self.run_job_pre(job)
        self._submit(jobs)

    def run_job(self, job: JobExecutorInterface) -> None:
        """Submits one job."""
        self._submit([job])

    def _submit(self, jobs: List[JobExecutorInterface]) -> None:
        try:
            home = self._serve_home()
            self._batch_count += 1
            name = f"{self._stamp}-{self._batch_count}"
            batch = Batch(
                name,
                self._root,
                self._pool,
                self._runs,
                self._cluster,
                home.url,
                self._settings.python,
            )
            plans = [self._plan(job) for job in jobs]
            self._batches.append(batch)
            batch.submit(
                plans,
                self._source_paths(),
                self._cache_bytes_max,
                self._settings.resource_timeout,
            )
        except (bafs.BafsError, OSError) as error:
            raise WorkflowError(f"BAFS: {error}") from error
        for job, plan in zip(jobs, plans):
            info = SubmittedJobInfo(
                job, external_jobid=f"{name}/{plan.name}", aux={"batch": batch, "name": plan.name}
            )
            self.report_job_submission(info)

    def _serve_home(self) -> bafs.HomeServer:
        """Starts the home server of this workflow, with the first batch."""
        if self._home is None:
            name = f"snakemake-{uuid.uuid4().hex[:8]}"
            listen = self._settings.listen or f"{address_towards(self._cluster.catalog)}:0"
            log = self._export.parent / "home.log"
            self._home = bafs.HomeServer(
                self._cluster, self._export, name, listen, log, metrics=True
            )
        elif not self._home.is_running:
            raise bafs.BafsError(f"the home server ended: see {self._export.parent}/home.log")
        return self._home

    def _plan(self, job: JobExecutorInterface) -> JobPlan:
        parts = list(job.jobs) if job.is_group() else [job]
        needed = [f for part in parts for f in self._needed_outputs(part, parts)]
        products = {str(f) for part in parts for f in part.output}
        inputs = [f for part in parts for f in part.input if str(f) not in products]
        updated = [f for f in needed if has_flag(f, "update") and os.path.exists(f)]
        logs = [f for part in parts for f in part.log]
        logs += [part.benchmark for part in parts if part.benchmark]
        resources = job.resources
        disk, memory = positive(resources, "disk_mb"), positive(resources, "mem_mb")
        runtime = positive(resources, "runtime")
        cpus = max(1, job.threads)
        if self._slots_max:
            # Snakemake scales threads down to the processors that there are, too.
            cpus = min(cpus, self._slots_max)
        return JobPlan(
            name=job_name(job),
            command=self.format_job_exec(job),
            cpus=cpus,
            scratch_bytes=disk * 1_000_000 if disk else SCRATCH_BYTES_DEFAULT,
            memory_bytes=memory * 1_000_000 + SNAKEMAKE_MEMORY_BYTES if memory else None,
            runtime_s=runtime * 60 if runtime else None,
            priority=max(-1_000_000, min(1_000_000, int(job.priority))),
            inputs=self._travelling(inputs),
            copies=self._travelling(updated),
            files=self._delivered(f for f in needed if not has_flag(f, "directory")),
            directories=self._delivered(f for f in needed if has_flag(f, "directory")),
            logs=self._delivered(logs),
            stored_inputs={url: self._stored_bytes(f) for f in inputs if (url := stored_url(f))},
            stored_outputs=list(dict.fromkeys(filter(None, map(stored_url, [*needed, *logs])))),
        )

    def _stored_bytes(self, f: Any) -> int:
        """Size of a stored input, as Snakemake's inventory knows it."""
        known = self.workflow.iocache.size.get(f.storage_object.cache_key())
        return int(known if known is not None else f.storage_object.size())

    def _needed_outputs(self, part: Any, parts: List[Any]) -> Iterable[Any]:
        """Outputs of a job that others than the jobs of its group need."""
        for f in part.output:
            if any(has_flag(f, flag) for flag in LOCAL_FLAGS):
                continue
            if has_flag(f, "temp") and len(parts) > 1 and not self._is_needed(f, part, parts):
                continue
            yield f

    def _is_needed(self, f: Any, part: Any, parts: List[Any]) -> bool:
        if f in self.dag.targetfiles:
            return True
        return any(
            f in files
            for other, files in self.dag.depending[part].items()
            if other not in parts and self.dag.needrun(other) and not self.dag.finished(other)
        )

    def _travelling(self, files: Iterable[Any]) -> list[Path]:
        """Inputs below the root. The storage plug-in of a job fetches those in a storage."""
        found = []
        for f in files:
            if is_stored(f) or not os.path.exists(f):
                continue
            path = self._root.relative(str(f))
            if path is not None:
                found.append(path)
            elif str(f) not in self._strangers:
                self._strangers.add(str(f))
                self.logger.warning(
                    f"BAFS: {f} is not below {self._root.path}; the nodes must have it, or set "
                    "--bafs-root."
                )
        return found

    def _delivered(self, files: Iterable[Any]) -> list[Path]:
        """Products that BAFS sends home."""
        found = []
        for f in files:
            if is_stored(f):
                continue
            path = self._root.relative(str(f))
            if path is None:
                raise WorkflowError(
                    f"BAFS: output {f} is not below {self._root.path}; set --bafs-root."
                )
            found.append(path)
        return list(dict.fromkeys(found))

    def _source_paths(self) -> list[Path]:
        """Snakefiles, scripts, configuration, and what the user names."""
        if self._sources is None:
            patterns = (self._settings.sources or "").split()
            named = (file for pattern in patterns for file in glob.glob(pattern, recursive=True))
            names = [*self.dag.get_sources(), *named]
            self._sources = [
                path
                for path in map(self._root.relative, names)
                if path is not None and self._root.absolute(path).exists()
            ]
        return self._sources

    # Supervision

    async def check_active_jobs(
        self, active_jobs: List[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Reports ended jobs and yields the others."""
        # The thread of this method begins before __post_init__ has set anything.
        if not active_jobs:
            return
        for batch in [batch for batch in self._batches if batch.is_over]:
            # Its process and pipes go with it. Another thread may add batches meanwhile.
            self._batches.remove(batch)
        batches = {id(info.aux["batch"]): info.aux["batch"] for info in active_jobs}
        for batch in batches.values():
            batch.refresh()
        for info in active_jobs:
            batch, name = info.aux["batch"], info.aux["name"]
            verdict = batch.verdict(name)
            if verdict is Verdict.ACTIVE:
                yield info
            elif verdict is Verdict.DONE:
                self._take_results(info)
                self.report_job_success(info)
            else:
                message, log = batch.take_failure(name)
                logs = [str(log)] if log is not None else None
                self.report_job_error(info, msg=message, aux_logs=logs)

    def _take_results(self, info: SubmittedJobInfo) -> None:
        taken = {str(p) for p in info.aux["batch"].take_results(info.aux["name"])}
        if not info.job.is_group():
            return
        # Results of a group arrive in any order; a later level must not look older.
        now_ns = time.time_ns()
        for level, parts in enumerate(info.job.toposorted):
            for f in (f for part in parts for f in part.output):
                path = None if is_stored(f) else self._root.relative(str(f))
                if path is not None and str(path) in taken:
                    times_ns = (now_ns + level, now_ns + level)
                    os.utime(self._root.absolute(path), ns=times_ns)

    def cancel_jobs(self, active_jobs: List[SubmittedJobInfo]) -> None:
        """Ends the runs of all batches, at once, and waits for them."""
        for batch in self._batches:
            batch.request_cancel()

    def shutdown(self) -> None:
        """Ends what this executor started, and removes the staged files."""
        super().shutdown()
        for batch in self._batches:
            batch.end()
        if self._home is not None:
            self._write_summary(self._home)
            self._home.stop()
            self._home = None
        shutil.rmtree(self._export, ignore_errors=True)

    def _write_summary(self, home: bafs.HomeServer) -> None:
        """Says what crossed the link from this machine; the ideal is each byte once."""
        try:
            sent = home.read_bytes()
        except (OSError, KeyError):
            return
        summary = {
            "batches": self._batch_count,
            "home_read_bytes": sent,
            "home_unique_bytes": sum(self._pool.sizes.values()) + self._pool.own_bytes,
        }
        (self._export.parent / "summary.json").write_text(json.dumps(summary) + "\n")
        self.logger.info(
            f"BAFS: {self._batch_count} batches read {sent} bytes from this machine, of "
            f"{summary['home_unique_bytes']} bytes of inputs and sources."
        )


def job_name(job: JobExecutorInterface) -> str:
    """Name of a job in BAFS: its rule or group, and its number."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", job.name).lstrip(".-")[:200]
    return f"{name or 'job'}.{job.jobid}"


def has_flag(f: Any, flag: str) -> bool:
    """Whether Snakemake flagged a file, as with `temp()`."""
    return bool(getattr(f, "flags", {}).get(flag, False))


def is_stored(f: Any) -> bool:
    """Whether a storage plug-in has the file."""
    return bool(getattr(f, "is_storage", False))


def stored_url(f: Any) -> Optional[str]:
    """URL of a file that the storage plug-in of BAFS handles."""
    if not is_stored(f):
        return None
    provider = type(f.storage_object.provider).__module__
    return str(f.storage_object.query) if provider == STORAGE_MODULE else None


def positive(resources: Any, name: str) -> Optional[int]:
    """A resource as a positive number; none if it is absent, or not known yet."""
    value = resources.get(name)
    return value if isinstance(value, int) and value > 0 else None


def address_towards(catalog: str) -> str:
    """Address of this machine on the way to the catalog."""
    host, port = catalog.rsplit(":", 1)
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # No packet is sent: the system only looks up the route.
        probe.connect(target)
        address = str(probe.getsockname()[0])
    return f"[{address}]" if family == socket.AF_INET6 else address
