"""A cluster: its servers, its volumes, programs on its volumes, and runs."""

from __future__ import annotations

import os
import subprocess
import uuid
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, Iterator, Mapping, Optional, Sequence, Union
from urllib.parse import urlparse

from .errors import (
    EXIT_ENVIRONMENT,
    AmbiguousVolume,
    BafsError,
    CommandFailed,
    EnvironmentFailed,
    VolumeNotFound,
)
from .program import call_json, find_program
from .records import FileStatus, Receipt, Server, Volume
from .runs import PathLike, Run

#: Path of the volume in the name space of the programs that `put`, `get` and `stat` run.
_MOUNT_POINT = "/tmp/bafs-volume"

#: Space of the small cache volumes through which `get` and `stat` read a home.
_BROWSE_BYTES = 64 << 20

#: Space of a scratch volume beyond the file that `put` writes: its directories.
_DIRECTORY_BYTES = 1 << 20


class Cluster:
    """A cluster by its identity (a directory) and the address of its catalog.

    What is not given comes from BAFS_IDENTITY and BAFS_CATALOG.
    """

    def __init__(self, identity: Optional[PathLike] = None, catalog: Optional[str] = None) -> None:
        found = os.fspath(identity) if identity is not None else os.environ.get("BAFS_IDENTITY")
        address = catalog if catalog is not None else os.environ.get("BAFS_CATALOG")
        if not found or not address:
            raise BafsError(
                "no cluster: give identity and catalog, or set BAFS_IDENTITY and BAFS_CATALOG"
            )
        #: Absolute path of the identity.
        self.identity = os.path.abspath(os.path.expanduser(found))
        #: Address of the catalog, HOST:PORT.
        self.catalog = address

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which the program finds this cluster."""
        return {"BAFS_IDENTITY": self.identity, "BAFS_CATALOG": self.catalog}

    def _call(self, *arguments: str, timeout_s: Optional[float] = None) -> Any:
        return call_json(arguments, environment=self.environment, timeout_s=timeout_s)

    def servers(self) -> list[Server]:
        """All live servers."""
        return [Server.from_json(value) for value in self._call("servers")]

    def nodes(self) -> list[Server]:
        """All live nodes."""
        return [server for server in self.servers() if server.kind == "node"]

    # Volumes

    def create_scratch(
        self,
        name: str,
        size: Union[int, str],
        *,
        node: Optional[str] = None,
        source: Optional[str] = None,
        files: Optional[int] = None,
        lifetime_hours: Optional[int] = None,
    ) -> Volume:
        """Creates a scratch volume, on the node with most free space unless one is named.

        `source` is the URL of a home path with which it is filled.
        """
        options = ["--from", source] if source is not None else []
        return self._create(name, size, node, files, lifetime_hours, options)

    def create_cache(
        self,
        name: str,
        url: str,
        size: Union[int, str],
        *,
        node: Optional[str] = None,
        cooperative: Optional[str] = None,
        files: Optional[int] = None,
        lifetime_hours: Optional[int] = None,
    ) -> Volume:
        """Creates a cache volume of a home path, by default where most space is free."""
        options = ["--cache", url]
        if cooperative is not None:
            options += ["--cooperative", cooperative]
        return self._create(name, size, node, files, lifetime_hours, options)

    def _create(
        self,
        name: str,
        size: Union[int, str],
        node: Optional[str],
        files: Optional[int],
        lifetime_hours: Optional[int],
        options: Sequence[str],
    ) -> Volume:
        words = ["volume", "create", name, "--node", node or self._roomiest_node()]
        words += ["--size", f"{size} B" if isinstance(size, int) else size, *options]
        if files is not None:
            words += ["--files", str(files)]
        if lifetime_hours is not None:
            words += ["--lifetime-hours", str(lifetime_hours)]
        return Volume.from_json(self._call(*words))

    def _roomiest_node(self) -> str:
        nodes = self.nodes()
        if not nodes:
            raise BafsError(f"the catalog {self.catalog} lists no node")
        return max(nodes, key=lambda node: node.free_bytes).name

    def volumes(self) -> list[Volume]:
        """The volumes of all live nodes."""
        return [Volume.from_json(value) for value in self._call("volume", "list")]

    def volume(self, volume: str) -> Volume:
        """The volume of an id or name. Raises `VolumeNotFound` or `AmbiguousVolume`."""
        found = [v for v in self.volumes() if volume in (v.id, v.name)]
        if not found:
            raise VolumeNotFound(f"no volume {volume!r} on any live node")
        if len(found) > 1:
            places = ", ".join(f"{v.id} on {v.node}" for v in found)
            raise AmbiguousVolume(f"several volumes are named {volume!r}: {places}")
        return found[0]

    def delete(self, volume: Union[str, Volume]) -> None:
        """Deletes a volume."""
        self._call("volume", "delete", _id(volume))

    def replicate(self, volume: Union[str, Volume], node: str) -> Volume:
        """Copies a scratch volume to another node."""
        return Volume.from_json(self._call("volume", "replicate", _id(volume), "--to", node))

    def extract(self, volume: Union[str, Volume], path: str, url: str) -> Receipt:
        """Sends a file of a scratch volume home, and waits until it is durable there."""
        value = self._call("volume", "extract", _id(volume), path, url)
        return Receipt(value["path"], value["size"], value["blake3"])

    # Programs on this machine, with volumes mounted

    def exec(
        self,
        program: Sequence[str],
        mounts: Mapping[str, Union[str, Volume]],
        *,
        share_tmp: bool = False,
        check: bool = True,
        timeout_s: Optional[float] = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program here, in a private name space. `mounts` maps paths to volumes.

        A path may end with `:ro` or `:write-back`. With `share_tmp` the program sees the host's
        /tmp. Raises `EnvironmentFailed`; with `check`, `subprocess.CalledProcessError`, too.
        """
        words = ["--json", "exec"]
        for path, volume in mounts.items():
            words += ["--mount", f"{_id(volume)}:{path}"]
        if share_tmp:
            words += ["--share", "/tmp", "--share", "/var/tmp"]
        words += ["--", *program]
        done = subprocess.run(
            [find_program(), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **self.environment},
            timeout=timeout_s,
            check=False,
        )
        if done.returncode == EXIT_ENVIRONMENT:
            raise EnvironmentFailed(words, done.returncode, done.stderr.strip())
        if check:
            done.check_returncode()
        return done

    def put(self, local: PathLike, volume: Union[str, Volume], path: str) -> None:
        """Copies a local file or directory into a scratch volume, over what is there."""
        script = 'rm -rf -- "$2" && mkdir -p -- "$(dirname -- "$2")" && cp -a -- "$1" "$2"'
        self._copy(script, os.path.abspath(local), _inside(path), volume, "")

    def get(self, volume: Union[str, Volume], path: str, local: PathLike) -> None:
        """Copies a file or directory of a volume to a local path, over what is there.

        Raises `FileNotFoundError` if the volume has no such path.
        """
        if self.stat(volume, path) is None:
            raise FileNotFoundError(f"no {path!r} in volume {_id(volume)}")
        script = 'rm -rf -- "$2" && cp -aL -- "$1" "$2"'
        self._copy(script, _inside(path), os.path.abspath(local), volume, ":ro")

    def _copy(
        self, script: str, source: str, target: str, volume: Union[str, Volume], mode: str
    ) -> None:
        words = ["sh", "-c", script, "sh", source, target]
        done = self.exec(words, {_MOUNT_POINT + mode: volume}, share_tmp=True, check=False)
        if done.returncode != 0:
            raise BafsError(f"cannot copy {source} to {target}: {done.stderr.strip()}")

    def stat(self, volume: Union[str, Volume], path: str) -> Optional[FileStatus]:
        """Size and time of a path of a volume, or none if it is not there."""
        words = ["stat", "-L", "-c", "%F\t%s\t%.9Y", "--", _inside(path)]
        done = self.exec(words, {f"{_MOUNT_POINT}:ro": volume}, check=False)
        if done.returncode != 0:
            return None
        kind, size, modified = done.stdout.rstrip("\n").split("\t")
        return FileStatus(kind == "directory", int(size), float(modified))

    # Files of a home, through volumes that live as long as the call

    def put_home(self, local: PathLike, url: str) -> Receipt:
        """Sends a local file home, and waits until it is durable there."""
        size = os.stat(local).st_size
        volume = self.create_scratch(_temporary_name(), 2 * size + _DIRECTORY_BYTES)
        try:
            self.put(local, volume, "file")
            return self.extract(volume, "file", url)
        finally:
            self.delete(volume)

    def get_home(self, url: str, local: PathLike) -> None:
        """Copies a file or directory of a home to a local path, with its time."""
        name = PurePosixPath(url).name
        with self._browse(url) as volume:
            # A file is alone in its volume, under its own name; a directory is the volume.
            path = name if self.stat(volume, name) is not None else "."
            self.get(volume, path, local)

    def stat_home(self, url: str) -> Optional[FileStatus]:
        """Size and time of a file or directory of a home, or none if it is not there."""
        name = PurePosixPath(url).name
        try:
            with self._browse(url) as volume:
                return self.stat(volume, name) or self.stat(volume, ".")
        except CommandFailed as error:
            self._require_absence(url, error)
            return None

    def list_home(self, url: str) -> Mapping[str, FileStatus]:
        """All files below a directory of a home, by relative path; none if it is not there."""
        words = ["find", "-L", _MOUNT_POINT, "-mindepth", "1", "-printf", "%P\\t%y\\t%s\\t%T@\\0"]
        try:
            with self._browse(url) as volume:
                text = self.exec(words, {f"{_MOUNT_POINT}:ro": volume}).stdout
        except CommandFailed as error:
            self._require_absence(url, error)
            return {}
        found = {}
        for line in text.split("\0")[:-1]:
            path, kind, size, modified = line.rsplit("\t", 3)
            found[path] = FileStatus(kind == "d", int(size), float(modified))
        return found

    def _require_absence(self, url: str, error: CommandFailed) -> None:
        """Raises the error unless its reason can only be that the home lacks the path.

        The program says in words alone why it cannot create a volume. So the other reasons are
        looked for: a home that is not alive, and nodes without space.
        """
        host = urlparse(url).netloc
        servers = self.servers()
        homes = [s for s in servers if s.kind == "home" and host in (s.name, s.address)]
        has_space = any(s.free_bytes >= _BROWSE_BYTES for s in servers if s.kind == "node")
        if not homes or not has_space:
            raise error

    @contextmanager
    def _browse(self, url: str) -> Iterator[Volume]:
        volume = self.create_cache(_temporary_name(), url, _BROWSE_BYTES, lifetime_hours=1)
        try:
            yield volume
        finally:
            self.delete(volume)

    # Runs

    def start(
        self,
        workflow: PathLike,
        *,
        user: Optional[str] = None,
        resource_timeout: Optional[str] = None,
        checkpoint: Optional[str] = None,
    ) -> Run:
        """Starts a run of a workflow file, with its journal beside the file."""
        options = []
        if user is not None:
            options += ["--user", user]
        if resource_timeout is not None:
            options += ["--resource-timeout", resource_timeout]
        if checkpoint is not None:
            options += ["--checkpoint", checkpoint]
        return Run(workflow, options, self.environment)

    def run(self, workflow: PathLike, *, timeout_s: Optional[float] = None) -> Mapping[str, Any]:
        """Runs a workflow file to its end and returns the summary. Raises as `Run.wait`."""
        return self.start(workflow).wait(timeout_s)


def _id(volume: Union[str, Volume]) -> str:
    return volume.id if isinstance(volume, Volume) else volume


def _inside(path: str) -> str:
    if path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} is no path relative to the root of a volume")
    return f"{_MOUNT_POINT}/{path}"


def _temporary_name() -> str:
    return f"python-{uuid.uuid4().hex[:12]}"
