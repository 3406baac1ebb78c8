"""Staging of Parsl files with URLs such as `bafs://home/data/genome.fa`.

Inputs come to a worker through cache volumes that outlive the task, one for each node and version
of a file. So a file crosses the link from home once, for all tasks of all workers. Outputs are
sent home before the task ends.
"""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Any, Callable, Optional, Union

from parsl.data_provider.staging import Staging

from .cluster import Cluster
from .records import Volume

#: Size of a cache beyond its file: the last block, and a block of rounding.
_ROUNDING_BYTES = 2 * (64 << 10)


class BafsStaging(Staging):
    """Stages `bafs:` files in the task. Workers need the module, the program and an identity.

    What is not given here, each worker takes from its BAFS_IDENTITY and BAFS_CATALOG.
    """

    def __init__(self, identity: Optional[str] = None, catalog: Optional[str] = None) -> None:
        self._identity = identity
        self._catalog = catalog

    def can_stage_in(self, file: Any) -> bool:
        """Whether the file is in a home."""
        return bool(file.scheme == "bafs")

    def can_stage_out(self, file: Any) -> bool:
        """Whether the file is in a home."""
        return bool(file.scheme == "bafs")

    def stage_in(self, dm: Any, executor: str, file: Any, parent_fut: Any) -> None:
        """Chooses the local path."""
        self._choose_path(dm, executor, file)

    def stage_out(self, dm: Any, executor: str, file: Any, app_fu: Any) -> None:
        """Chooses the local path."""
        self._choose_path(dm, executor, file)

    def _choose_path(self, dm: Any, executor: str, file: Any) -> None:
        directory = dm.dfk.executors[executor].working_dir or ""
        # Files of one name from different directories must not meet.
        name = f"{_digest(file.url)}-{file.filename}"
        file.local_path = os.path.join(directory, "bafs", name)

    def replace_task(
        self, dm: Any, executor: str, file: Any, func: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Fetches the file before the task."""
        where = (self._identity, self._catalog)
        return fetch_before(func, where, file.url, file.local_path)

    def replace_task_stage_out(
        self, dm: Any, executor: str, file: Any, func: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Sends the file home after the task."""
        where = (self._identity, self._catalog)
        return send_after(func, where, file.url, file.local_path)


Where = tuple[Optional[str], Optional[str]]


def fetch_before(func: Callable[..., Any], where: Where, url: str, path: str) -> Callable[..., Any]:
    """A task that, on its worker, first fetches an input."""

    def task(*args: Any, **kwargs: Any) -> Any:
        fetch(Cluster(*where), url, path)
        return func(*args, **kwargs)

    return task


def send_after(func: Callable[..., Any], where: Where, url: str, path: str) -> Callable[..., Any]:
    """A task that, on its worker, sends an output home at its end."""

    def task(*args: Any, **kwargs: Any) -> Any:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        result = func(*args, **kwargs)
        Cluster(*where).put_home(path, url)
        return result

    return task


def fetch(cluster: Cluster, url: str, path: str) -> None:
    """Copies a file of a home to a path, through this node's part of the file's cache."""
    status = cluster.stat_home(url)
    if status is None:
        raise FileNotFoundError(url)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # A changed file has another name, so no task sees an old version.
    name = f"parsl-{_digest(f'{url} {status.size_bytes} {status.modified}')}"
    volume = _local_part(cluster, name, url, status.size_bytes + _ROUNDING_BYTES)
    part = f"{path}.{os.getpid()}.part"
    cluster.get(volume, url.rsplit("/", 1)[1], part)
    os.replace(part, path)


def _local_part(cluster: Cluster, name: str, url: str, size_bytes: int) -> Union[str, Volume]:
    """The cache volume of a file on this node; on any node if this machine is none."""
    host = socket.gethostname()
    found = [v for v in cluster.volumes() if v.name == name and v.state == "ready"]
    here = host if any(node.name == host for node in cluster.nodes()) else None
    for volume in found:
        if here is None or volume.node == here:
            return volume
    return cluster.create_cache(name, url, size_bytes, node=here)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
