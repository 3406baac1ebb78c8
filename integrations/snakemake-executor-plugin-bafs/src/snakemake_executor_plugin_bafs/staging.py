"""Puts files for jobs below the directory that the home server exports, by hard links.

A source, or a file that several jobs of a batch read, is there once, and in the tree of each job as a symbolic
link to the place where the job sees the batch's cache volume. All other files are in the tree of
their job, from which BAFS fills the job's volume.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import Counter
from pathlib import Path
from typing import Callable, Iterable, Mapping

#: Where a job sees the inputs that several jobs share.
SHARED_INPUTS = "/tmp/bafs-inputs"

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


def stage_inputs(
    root: Root,
    inputs: Mapping[str, Iterable[Path]],
    sources: Iterable[Path],
    shared: Path,
    trees: Mapping[str, Path],
) -> None:
    """Puts the inputs of each job, and the sources of all, into `shared` or the job's tree.

    Paths are relative to the root. Sources are shared in any case: a job reads few of them.
    """
    common = set(sources)
    wanted = {name: drop_nested([*paths, *common]) for name, paths in inputs.items()}
    readers = Counter(path for paths in wanted.values() for path in paths)
    for name, paths in wanted.items():
        trees[name].mkdir(parents=True, exist_ok=True)
        for path in paths:
            source = root.absolute(path)
            if readers[path] == 1 and path not in common:
                link_tree(source, trees[name] / path)
                continue
            place = shared / path
            if not place.exists():
                link_tree(source, place)
            link_shared(source, trees[name] / path, path)


def drop_nested(paths: Iterable[Path]) -> list[Path]:
    """Sorted paths without those below another one."""
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not kept or not path.is_relative_to(kept[-1]):
            kept.append(path)
    return kept


def link_shared(source: Path, target: Path, path: Path) -> None:
    """Makes the symbolic link by which a job reads a shared input, with the input's time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(f"{SHARED_INPUTS}/{path}")
    times = os.stat(source)
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns), follow_symlinks=False)


def link_tree(source: Path, target: Path) -> None:
    """Hard-links a file, or all files of a directory. Symbolic links are followed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    real = os.path.realpath(source)
    if not os.path.isdir(real):
        if not target.exists():
            link_file(real, str(target))
        return
    copy: Callable[[str, str], object] = link_file
    shutil.copytree(real, target, copy_function=copy, dirs_exist_ok=True)


def link_file(source: str, target: str) -> str:
    """Hard-links a file; copies it from another file system, or if the system forbids links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK):
            raise
        shutil.copy2(source, target)
    return target


def disk_bytes(tree: Path) -> int:
    """Space that a copy of a tree takes on a node."""
    total = BLOCK_BYTES
    for directory, names, files in os.walk(tree):
        total += BLOCK_BYTES * len(names)
        for name in files:
            size = os.lstat(os.path.join(directory, name)).st_size
            total += -(-size // BLOCK_BYTES) * BLOCK_BYTES
    return total


def file_sizes(tree: Path) -> dict[tuple[int, int], int]:
    """Sizes of the regular files of a tree, by device and inode: links to a file are one file."""
    sizes = {}
    for directory, _, files in os.walk(tree):
        for name in files:
            status = os.lstat(os.path.join(directory, name))
            if stat.S_ISREG(status.st_mode):
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sizes


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
