"""Puts files for jobs below the directory that the home server exports, by hard links.

A file has one link there, however many jobs and batches read it: another link would change the
time of its last change, by which a home server notices that a file is not what a cache has. Jobs
see all these files in one cache volume, and at their own paths as symbolic links into it.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Iterable, Iterator

#: Where a job sees the cache volume of all inputs and sources.
INPUTS = "/tmp/bafs-inputs"

#: Disk block of a node: BAFS counts whole blocks.
BLOCK_BYTES = 4096


class Root:
    """The directory whose files travel. A job sees its volume at the same path."""

    def __init__(self, path: Path, workdir: Path) -> None:
        self.path = path
        #: Working directory of Snakemake, below the root.
        self.workdir = workdir

    def relative(self, file: str) -> Path | None:
        """Path of a file below the root; none if it is elsewhere."""
        absolute = Path(os.path.normpath(self.workdir / file))
        if absolute == self.path or not absolute.is_relative_to(self.path):
            return None
        return absolute.relative_to(self.path)

    def absolute(self, relative: Path) -> Path:
        """The file on this machine, and in a job."""
        return self.path / relative


class Pool:
    """The linked files, each as long as an active batch uses it. Paths are relative to the root."""

    def __init__(self, root: Root, directory: Path) -> None:
        self._root = root
        #: Directory of the files, below the export.
        self.directory = directory
        self._users: dict[Path, int] = {}
        #: Sizes of all files that were ever linked, by device and inode.
        self.sizes: dict[tuple[int, int], int] = {}
        #: Size of what batches wrote for their jobs.
        self.own_bytes = 0
        # Jobs are submitted by one thread of Snakemake, and end in another.
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def acquire(self, paths: Iterable[Path]) -> set[Path]:
        """Links files, and all files of directories. Returns the files, for `release`."""
        with self._lock:
            files = {file for path in paths for file in self._files_of(path)}
            for file in files:
                self._users[file] = self._users.get(file, 0) + 1
                self._link(file)
            return files

    def release(self, files: Iterable[Path]) -> None:
        """Removes the files that no other batch uses, so that Snakemake's removals free space."""
        with self._lock:
            for file in files:
                self._users[file] -= 1
                if self._users[file] == 0:
                    del self._users[file]
                    (self.directory / file).unlink(missing_ok=True)

    def bytes_of(self, files: Iterable[Path]) -> int:
        """Space of files in a cache, which counts whole blocks."""
        sizes = (os.stat(self.directory / file).st_size for file in files)
        return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)

    def count(self) -> int:
        """Files in the pool."""
        return len(self._users)

    def _files_of(self, path: Path) -> Iterator[Path]:
        source = self._root.absolute(path)
        if not source.is_dir():
            yield path
            return
        (self.directory / path).mkdir(parents=True, exist_ok=True)
        for directory, names, files in os.walk(source, followlinks=True):
            place = path / os.path.relpath(directory, source)
            for name in names:
                (self.directory / place / name).mkdir(parents=True, exist_ok=True)
            for name in files:
                yield place / name

    def _link(self, file: Path) -> None:
        source = os.path.realpath(self._root.absolute(file))
        target = self.directory / file
        status = os.stat(source)
        self.sizes[status.st_dev, status.st_ino] = status.st_size
        if target.exists():
            if os.path.samestat(os.stat(target), status) or self._users[file] > 1:
                return
            target.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        link_file(source, str(target))


def link_file(source: str, target: str) -> None:
    """Hard-links a file; copies it from another file system, or if the system forbids links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK):
            raise
        shutil.copy2(source, target)


def drop_nested(paths: Iterable[Path]) -> list[Path]:
    """Sorted paths without those below another one."""
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not kept or not path.is_relative_to(kept[-1]):
            kept.append(path)
    return kept


def link_inputs(root: Root, paths: Iterable[Path], tree: Path) -> None:
    """Makes the symbolic links by which a job reads its inputs, with the times of the inputs."""
    for path in drop_nested(paths):
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(f"{INPUTS}/{path}")
        times = os.stat(root.absolute(path))
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns), follow_symlinks=False)


def disk_bytes(tree: Path) -> int:
    """Space that a copy of a tree takes on a node."""
    total = BLOCK_BYTES
    for directory, names, files in os.walk(tree):
        total += BLOCK_BYTES * len(names)
        for name in files:
            size = os.lstat(os.path.join(directory, name)).st_size
            total += -(-size // BLOCK_BYTES) * BLOCK_BYTES
    return total


def take_file(source: Path, target: Path) -> None:
    """Moves a result into place; source and target are on one file system as a rule."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target)
