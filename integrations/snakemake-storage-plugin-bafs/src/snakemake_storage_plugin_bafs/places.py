"""Where the files of a home are, as seen from here: three ways to the same URLs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Mapping, Optional, Protocol
from urllib.parse import urlparse

import bafs
from bafs import FileStatus

#: Variable by which the executor of BAFS names a file that says where a job's stored files are.
JOB_MAP_VARIABLE = "SNAKEMAKE_STORAGE_BAFS_FILES"


class Place(Protocol):
    """A way to the files of homes, by URL."""

    def status(self, url: str) -> Optional[FileStatus]:
        """Size and time, or none if there is no such file."""

    def siblings(self, url: str) -> Mapping[str, FileStatus]:
        """All files below the directory of a URL, by URL."""

    def retrieve(self, url: str, local: Path) -> None:
        """Makes a file appear at a local path."""

    def store(self, local: Path, url: str) -> None:
        """Makes a local file durable at home."""

    def remove(self, url: str) -> bool:
        """Removes a file, and returns whether that is possible."""


class JobPlace:
    """In a job of the BAFS executor: inputs are mounted, and BAFS sends the outputs home.

    No identity of the cluster is needed here.
    """

    def __init__(self, file: str) -> None:
        files = json.loads(Path(file).read_text(encoding="utf-8"))
        self._inputs: Mapping[str, str] = files["inputs"]
        self._outputs: Mapping[str, str] = files["outputs"]

    def _path(self, url: str) -> Optional[str]:
        stored = self._outputs.get(url)
        return stored if stored and os.path.exists(stored) else self._inputs.get(url)

    def status(self, url: str) -> Optional[FileStatus]:
        path = self._path(url)
        return local_status(path) if path is not None else None

    def siblings(self, url: str) -> Mapping[str, FileStatus]:
        found = self.status(url)
        return {} if found is None else {url: found}

    def retrieve(self, url: str, local: Path) -> None:
        path = self._path(url)
        if path is None:
            raise FileNotFoundError(f"{url} is no declared input of this job")
        # The agent reads from the cache only what the program reads.
        local.unlink(missing_ok=True)
        local.symlink_to(path)

    def store(self, local: Path, url: str) -> None:
        target = self._outputs.get(url)
        if target is None:
            raise FileNotFoundError(f"{url} is no declared output of this job")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy2(local, target)

    def remove(self, url: str) -> bool:
        target = self._outputs.get(url)
        if target is not None:
            Path(target).unlink(missing_ok=True)
        return target is not None


class ExportPlace:
    """On the machine of the home server: the exported directory itself."""

    def __init__(self, export: str) -> None:
        self._export = Path(export)

    def _path(self, url: str) -> Path:
        return self._export / path_of(url)

    def status(self, url: str) -> Optional[FileStatus]:
        return local_status(str(self._path(url)))

    def siblings(self, url: str) -> Mapping[str, FileStatus]:
        parent, home = self._path(url).parent, url[: len(url) - len(path_of(url))]
        found = {}
        for path in parent.rglob("*") if parent.is_dir() else ():
            status = local_status(str(path))
            if status is not None and not status.is_directory:
                found[home + str(path.relative_to(self._export))] = status
        return found

    def retrieve(self, url: str, local: Path) -> None:
        shutil.copy2(self._path(url), local)

    def store(self, local: Path, url: str) -> None:
        target = self._path(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(local, part)
        os.replace(part, target)

    def remove(self, url: str) -> bool:
        self._path(url).unlink(missing_ok=True)
        return True


class ClusterPlace:
    """Anywhere else: through the cluster, by volumes that live as long as the operation."""

    def __init__(self, cluster: bafs.Cluster) -> None:
        self._cluster = cluster

    def status(self, url: str) -> Optional[FileStatus]:
        return self._cluster.stat_home(url)

    def siblings(self, url: str) -> Mapping[str, FileStatus]:
        parent = url.rsplit("/", 1)[0]
        found = self._cluster.list_home(parent)
        return {f"{parent}/{path}": s for path, s in found.items() if not s.is_directory}

    def retrieve(self, url: str, local: Path) -> None:
        self._cluster.get_home(url, local)

    def store(self, local: Path, url: str) -> None:
        self._cluster.put_home(local, url)

    def remove(self, url: str) -> bool:
        # The program has no command that removes a file of a home.
        return False


def find_place(identity: Optional[str], catalog: Optional[str], export: Optional[str]) -> Place:
    """The nearest way to the files from here."""
    job_map = os.environ.get(JOB_MAP_VARIABLE)
    if job_map:
        return JobPlace(job_map)
    if export:
        return ExportPlace(export)
    return ClusterPlace(bafs.Cluster(identity, catalog))


def path_of(url: str) -> str:
    """Path of a URL below its home."""
    return urlparse(url).path.lstrip("/")


def local_status(path: str) -> Optional[FileStatus]:
    """Size and time of a local path, or none if it is not there."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    is_directory = os.path.isdir(path)
    return FileStatus(is_directory, 0 if is_directory else found.st_size, found.st_mtime)
