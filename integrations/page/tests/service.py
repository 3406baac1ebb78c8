"""A service with its page, on a cluster of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Optional, Sequence, Type

from bafs.processes import LocalCluster
from bafs.program import call_json, find_program

#: Time for the service to take up its state and to listen, in seconds.
STOP_TIMEOUT_S = 30


class TestService:
    """`bafs scheduler --page`; a context manager."""

    __test__ = False

    def __init__(self, directory: Path) -> None:
        self.directory, self.export = directory, directory / "export"
        self.export.mkdir(parents=True)
        self.state = directory / "state"
        self._cluster = LocalCluster(self.export, nodes=2, slots=2)
        self._process: Optional[subprocess.Popen[str]] = None
        #: Where users reach it.
        self.address = ""

    def __enter__(self) -> TestService:
        self._cluster.__enter__()
        try:
            self.start()
        except BaseException:
            self._cluster.stop()
            raise
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.stop()
        self._cluster.stop()

    def start(self) -> None:
        """Starts the process, with the state that there is."""
        cluster = self._cluster.cluster
        words = ["--json", "scheduler", "--page", "--state", os.fspath(self.state)]
        words += ["--identity", os.fspath(self._cluster.identity), "--catalog", cluster.catalog]
        self._process = subprocess.Popen(
            [find_program(), *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.address = json.loads(self._process.stdout.readline())["listening"]

    def stop(self) -> None:
        """Ends the process; its runs go on."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def add_user(self, name: str, to: Path, options: Sequence[str] = ()) -> None:
        """Adds a user whose workflows may use the directory of that name at home."""
        (self.export / name).mkdir(exist_ok=True)
        self.call("user", "add", name, "--to", os.fspath(to), "--home", name, *options)

    def call(self, *words: str) -> object:
        """What a command says to the operator."""
        identity = os.fspath(self._cluster.identity)
        answer: object = call_json([*words, "--identity", identity, "--service", self.address])
        return answer
