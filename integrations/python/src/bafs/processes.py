"""Servers as processes of this one, and whole clusters of them for tests.

Each server ends when its standard input closes, and so with this process, even by SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Mapping, Optional, Sequence, Type

from .cluster import Cluster
from .errors import BafsError
from .program import call_json, find_program
from .runs import PathLike

#: Time for a server to end when it is asked to, in seconds.
STOP_TIMEOUT_S = 5.0

#: Time for the catalog to list the servers of a local cluster, in seconds.
START_TIMEOUT_S = 30.0

#: Variables that one server of the user's own cluster reads, and all of these would.
_FOREIGN_VARIABLES = ("BAFS_LISTEN", "BAFS_METRICS", "BAFS_IDENTITY", "BAFS_CATALOG")


class ServerProcess:
    """A server (`bafs catalog`, `home` or `node`) as a child process."""

    def __init__(
        self,
        arguments: Sequence[str],
        identity: PathLike,
        log: PathLike,
        environment: Optional[Mapping[str, str]] = None,
    ) -> None:
        words = ["--json", *arguments, "--identity", os.fspath(identity), "--until-stdin-closes"]
        variables = {**os.environ, **(environment or {})}
        for name in _FOREIGN_VARIABLES:
            variables.pop(name, None)
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [find_program(), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            reason = Path(log).read_text(errors="replace").strip()
            raise BafsError(f"bafs {arguments[0]} does not start: {reason}")
        answer = json.loads(line)
        #: Address at which it listens, HOST:PORT.
        self.address: str = answer["listening"]
        #: Address of its metrics, if it publishes any.
        self.metrics: Optional[str] = answer["metrics"]

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Closes its standard input, and ends it by force after a while."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


def read_metrics(address: str) -> Mapping[str, float]:
    """Metrics without labels of a server, by name (docs/reference/metrics.md)."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and not line.startswith("#"):
            found[words[0]] = float(words[1])
    return found


class LocalCluster:
    """A throw-away cluster on this machine: a catalog, a home and nodes `n1`, `n2`, …

    A context manager. At its end all processes and stores are gone; the export stays.
    """

    def __init__(
        self,
        export: PathLike,
        nodes: int = 4,
        *,
        slots: int = 1,
        node_size: str = "10GB",
        metrics: bool = False,
        environment: Optional[Mapping[str, str]] = None,
    ) -> None:
        #: Directory that the home `bafs://home/` exports.
        self.export = Path(export).resolve()
        self._nodes = nodes
        self._slots = slots
        self._node_size = node_size
        self._metrics = metrics
        self._environment = environment
        self._directory = Path()
        #: Processes by name: `catalog`, `home`, `n1`, …
        self.processes: dict[str, ServerProcess] = {}

    def __enter__(self) -> LocalCluster:
        self._directory = Path(tempfile.mkdtemp(prefix="bafs-python-"))
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.stop()

    @property
    def directory(self) -> Path:
        """Stores (`n1`, …), logs (`n1.log`, …) and the identity."""
        return self._directory

    @property
    def identity(self) -> Path:
        """The identity of its owner."""
        return self._directory / "identity"

    @property
    def cluster(self) -> Cluster:
        """The cluster as its users see it."""
        return Cluster(self.identity, self.processes["catalog"].address)

    def _start(self) -> None:
        call_json(["init", os.fspath(self.identity)])
        self._spawn("catalog", ["catalog"])
        catalog = ["--catalog", self.processes["catalog"].address]
        self._spawn("home", ["home", "--export", os.fspath(self.export), *catalog])
        usage = shutil.disk_usage(self._directory)
        # Nodes divide one disk, but each believes that it has it alone.
        share = usage.free // (4 * max(1, self._nodes * self._slots))
        for number in range(1, self._nodes + 1):
            words = ["node", "--name", f"n{number}", "--size", self._node_size, *catalog]
            words += ["--store", os.fspath(self._directory / f"n{number}")]
            words += ["--slots", str(self._slots), "--tmp", f"{share} B"]
            self._spawn(f"n{number}", words)
        # A server listens before the catalog lists it.
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self.cluster.servers()) < self._nodes + 1:
            if time.monotonic() > deadline:
                raise BafsError(f"not all servers are listed after {START_TIMEOUT_S} s")
            time.sleep(0.02)

    def _spawn(self, name: str, words: Sequence[str]) -> None:
        metrics = ["--metrics", "127.0.0.1:0"] if self._metrics else []
        log = self._directory / f"{name}.log"
        server = ServerProcess([*words, *metrics], self.identity, log, self._environment)
        self.processes[name] = server

    def stop(self) -> None:
        """Ends all processes and removes all files but the export."""
        for server in reversed(list(self.processes.values())):
            server.stop()
        self.processes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)


class HomeServer:
    """A home server of a running cluster, as long as this process lives. A context manager."""

    def __init__(
        self,
        cluster: Cluster,
        export: PathLike,
        name: str,
        listen: str,
        log: PathLike,
        *,
        metrics: bool = False,
    ) -> None:
        words = ["home", "--export", os.fspath(export), "--name", name, "--listen", listen]
        words += ["--catalog", cluster.catalog]
        words += ["--metrics", "127.0.0.1:0"] if metrics else []
        self._server = ServerProcess(words, cluster.identity, log)
        #: URL of the export.
        self.url = f"bafs://{name}"
        #: Address of its metrics, if it publishes any.
        self.metrics = self._server.metrics

    def __enter__(self) -> HomeServer:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._server.is_running

    def read_bytes(self) -> int:
        """Bytes of files that it has sent. It must publish metrics."""
        counters = read_metrics(self.metrics) if self.metrics is not None else {}
        return int(counters["bafs_home_read_bytes_total"])

    def stop(self) -> None:
        """Ends it."""
        self._server.stop()
