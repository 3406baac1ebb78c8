"""The file system `bafs://` for fsspec: files of homes and volumes, through the program.

    fs = fsspec.filesystem("bafs")                   # paths are URLs of homes: bafs://home/data
    fs = fsspec.filesystem("bafs", volume="work")    # paths are inside a volume
    pandas.read_csv("bafs://home/results/table.csv")

Each call mounts a volume for its duration, on this machine. So read a file as a whole, and list a
directory once. It needs the package fsspec.
"""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import PurePosixPath
from typing import IO, Any, Mapping, Optional

from fsspec.spec import AbstractFileSystem

from .cluster import Cluster
from .records import FileStatus

_MOUNT_POINT = "/tmp/bafs-volume"


class BafsFileSystem(AbstractFileSystem):
    """Homes and volumes of a cluster. Homes have no deletion; a file is written as a whole."""

    protocol = "bafs"
    root_marker = ""
    cachable = False

    def __init__(
        self,
        identity: Optional[str] = None,
        catalog: Optional[str] = None,
        volume: Optional[str] = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._cluster = Cluster(identity, catalog)
        self._volume = volume

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        return text[len("bafs://") :].strip("/") if text.startswith("bafs://") else text.strip("/")

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        return f"bafs://{self._strip_protocol(name)}"

    # What is there

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists a directory; a file lists itself."""
        path = self._strip_protocol(path)
        found = self._list(path)
        if not found:
            return [self._show(path, status) for status in [self._status(path)]]
        entries = [
            self._entry(path, name, status) for name, status in found.items() if "/" not in name
        ]
        entries.sort(key=lambda entry: str(entry["name"]))
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size, kind and time of a path. Raises `FileNotFoundError`."""
        path = self._strip_protocol(path)
        return self._show(path, self._status(path))

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, **options: Any) -> Any:
        """All files below a directory, by one call of the program."""
        path = self._strip_protocol(path)
        entries = [self._entry(path, name, status) for name, status in self._list(path).items()]
        depth = path.count("/") + 1
        wanted = {
            str(entry["name"]): entry
            for entry in entries
            if (withdirs or entry["type"] == "file")
            and (maxdepth is None or str(entry["name"]).count("/") - depth < maxdepth)
        }
        names = sorted(wanted)
        return {name: wanted[name] for name in names} if options.get("detail") else names

    def _list(self, path: str) -> Mapping[str, FileStatus]:
        if self._volume is None:
            return self._cluster.list_home(self.unstrip_protocol(path))
        words = ["find", "-L", f"{_MOUNT_POINT}/{path}", "-mindepth", "1"]
        words += ["-printf", "%P\\t%y\\t%s\\t%T@\\0"]
        mounts = {f"{_MOUNT_POINT}:ro": self._volume}
        done = self._cluster.exec(words, mounts, check=False)
        found = {}
        for line in done.stdout.split("\0")[:-1]:
            name, kind, size, modified = line.rsplit("\t", 3)
            found[name] = FileStatus(kind == "d", int(size), float(modified))
        return found

    def _status(self, path: str) -> FileStatus:
        if self._volume is None:
            status = self._cluster.stat_home(self.unstrip_protocol(path))
        else:
            status = self._cluster.stat(self._volume, path or ".")
        if status is None:
            raise FileNotFoundError(self.unstrip_protocol(path))
        return status

    def _entry(self, directory: str, name: str, status: FileStatus) -> dict[str, Any]:
        return self._show(f"{directory}/{name}" if directory else name, status)

    def _show(self, path: str, status: FileStatus) -> dict[str, Any]:
        kind = "directory" if status.is_directory else "file"
        size = 0 if status.is_directory else status.size_bytes
        return {"name": path, "type": kind, "size": size, "mtime": status.modified}

    # Content

    def get_file(self, rpath: str, lpath: str, callback: Any = None, **_: Any) -> None:
        """Copies a file here."""
        path = self._strip_protocol(rpath)
        os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        if self._status(path).is_directory:
            os.makedirs(lpath, exist_ok=True)
        elif self._volume is None:
            self._cluster.get_home(self.unstrip_protocol(path), lpath)
        else:
            self._cluster.get(self._volume, path, lpath)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **_: Any) -> None:
        """Copies a local file there; for a home, it returns when the file is durable."""
        path = self._strip_protocol(rpath)
        if os.path.isdir(lpath):
            return
        if self._volume is None:
            self._cluster.put_home(lpath, self.unstrip_protocol(path))
        else:
            self._cluster.put(lpath, self._volume, path)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        """The content of a file."""
        with self._open(path) as file:
            content = file.read()
        return content[slice(start, end)]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Writes a file as a whole."""
        if mode == "create" and self.exists(path):
            raise FileExistsError(self.unstrip_protocol(path))
        with self._open(path, "wb") as file:
            file.write(value)

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> IO[bytes]:
        path = self._strip_protocol(path)
        if mode == "rb":
            local = tempfile.NamedTemporaryFile(prefix=f"bafs-{PurePosixPath(path).name}-")
            if self._status(path).is_directory:
                raise IsADirectoryError(self.unstrip_protocol(path))
            self.get_file(path, local.name)
            # The program put another file in its place.
            return open(local.name, "rb")
        if mode in ("wb", "xb"):
            if mode == "xb" and self.exists(path):
                raise FileExistsError(self.unstrip_protocol(path))
            return _Upload(self, path)
        raise ValueError(f"mode {mode!r}: a file is read or written as a whole")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: directories come with their files."""

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Nothing: directories come with their files."""

    def created(self, path: str) -> Any:
        raise NotImplementedError("BAFS keeps no time of creation")

    def modified(self, path: str) -> Any:
        """When a file was written last."""
        from datetime import datetime, timezone

        return datetime.fromtimestamp(self.info(path)["mtime"], tz=timezone.utc)


class _Upload(io.BufferedWriter):
    """A local file that goes to its place when it is closed, and nowhere after an exception."""

    def __init__(self, system: BafsFileSystem, path: str) -> None:
        descriptor, self._local = tempfile.mkstemp(prefix="bafs-")
        super().__init__(io.FileIO(descriptor, "wb"))
        self._system, self._path, self._is_wanted = system, path, True

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._is_wanted = self._is_wanted and kind is None
        self.close()

    def close(self) -> None:
        """Sends the file, and waits until it is there."""
        if self.closed:
            return
        super().close()
        try:
            if self._is_wanted:
                self._system.put_file(self._local, self._path)
        finally:
            os.unlink(self._local)
