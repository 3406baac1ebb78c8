"""Snakemake storage for BAFS: files of a home, by URLs such as `bafs://home/data/genome.fa`.

The module `bafs` is the only way to the cluster. docs/guide/snakemake.md explains the design.
"""

# No `from __future__ import annotations`: Snakemake reads the types of the settings as types.

from dataclasses import dataclass, field
from typing import Any, Iterable, List, Optional
from urllib.parse import urlparse

import bafs
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_storage_plugins.io import (
    IOCacheStorageInterface,
    Mtime,
    get_constant_prefix,
)
from snakemake_interface_storage_plugins.settings import StorageProviderSettingsBase
from snakemake_interface_storage_plugins.storage_object import (
    StorageObjectGlob,
    StorageObjectRead,
    StorageObjectWrite,
)
from snakemake_interface_storage_plugins.storage_provider import (
    ExampleQuery,
    Operation,
    QueryType,
    StorageProviderBase,
    StorageQueryValidationResult,
)

from .places import find_place


@dataclass
class StorageProviderSettings(StorageProviderSettingsBase):
    """Options of the command line, with the prefix `--storage-bafs-`."""

    identity: Optional[str] = field(
        default=None,
        metadata={"help": "Directory that `bafs init` created. Defaults to BAFS_IDENTITY."},
    )
    catalog: Optional[str] = field(
        default=None,
        metadata={"help": "Address of the catalog, HOST:PORT. Defaults to BAFS_CATALOG."},
    )
    export: Optional[str] = field(
        default=None,
        metadata={
            "help": "Directory that the home server exports, if it is on this machine. Files "
            "are then read, written and removed there."
        },
    )


class StorageProvider(StorageProviderBase):
    """All homes of a cluster."""

    def __post_init__(self) -> None:
        settings = self.settings or StorageProviderSettings()
        try:
            self.place = find_place(settings.identity, settings.catalog, settings.export)
        except bafs.BafsError as error:
            raise WorkflowError(f"BAFS: {error}") from error

    @classmethod
    def example_queries(cls) -> List[ExampleQuery]:
        """Queries for the documents."""
        return [
            ExampleQuery(
                query="bafs://home/data/genome.fa",
                type=QueryType.ANY,
                description="A file of the home server with the default name, `home`.",
            )
        ]

    def rate_limiter_key(self, query: str, operation: Operation) -> Any:
        """The home."""
        return urlparse(query).netloc

    def default_max_requests_per_second(self) -> float:
        """Not used: BAFS bounds requests to homes itself."""
        return 0.0

    def use_rate_limiter(self) -> bool:
        """BAFS bounds requests to homes itself."""
        return False

    @classmethod
    def is_valid_query(cls, query: str) -> StorageQueryValidationResult:
        """Whether a query is the URL of a file of a home."""
        url = urlparse(query)
        reason = None
        if url.scheme != "bafs" or not url.netloc:
            reason = "it does not begin with bafs://HOME/"
        elif not url.path.strip("/") or query.endswith("/"):
            reason = "it names no file"
        elif ".." in url.path.split("/"):
            reason = "it has '..' in its path"
        return StorageQueryValidationResult(query=query, valid=reason is None, reason=reason)


class StorageObject(StorageObjectRead, StorageObjectWrite, StorageObjectGlob):
    """A file of a home."""

    async def inventory(self, cache: IOCacheStorageInterface) -> None:
        """Learns about all files of the directory at once."""
        if self.cache_key() in cache.exists_in_storage:
            return
        for url, status in self.provider.place.siblings(self.query).items():
            key = self.cache_key(local_suffix(url))
            cache.mtime[key] = Mtime(storage=status.modified)
            cache.size[key] = status.size_bytes
            cache.exists_in_storage[key] = True
        if self.cache_key() not in cache.exists_in_storage:
            cache.exists_in_storage[self.cache_key()] = False

    def get_inventory_parent(self) -> Optional[str]:
        """The directory, which one inventory covers."""
        return self.query.rsplit("/", 1)[0]

    def local_suffix(self) -> str:
        """Home and path."""
        return local_suffix(self.query)

    def cleanup(self) -> None:
        """Nothing is left beside the local copy."""

    def exists(self) -> bool:
        """Whether the home has the file."""
        return self.provider.place.status(self.query) is not None

    def _status(self) -> bafs.FileStatus:
        status = self.provider.place.status(self.query)
        if status is None:
            raise FileNotFoundError(self.query)
        return status

    def mtime(self) -> float:
        """Seconds since 1970."""
        return self._status().modified

    def size(self) -> int:
        """Size in bytes; 0 for a directory."""
        status = self._status()
        return 0 if status.is_directory else status.size_bytes

    def retrieve_object(self) -> None:
        """In a job of the BAFS executor a link to the mounted cache, else a copy."""
        self.provider.place.retrieve(self.query, self.local_path())

    def store_object(self) -> None:
        """Sends the local file home, atomically and durably."""
        local = self.local_path()
        if local.is_dir():
            raise WorkflowError(f"BAFS stores files only, and {local} is a directory")
        self.provider.place.store(local, self.query)

    def remove(self) -> None:
        """Removes the file, where that is possible."""
        if not self.provider.place.remove(self.query):
            self.provider.logger.warning(
                f"BAFS: {self.query} stays at home. Only the machine of the home server can "
                "remove it: set --storage-bafs-export there."
            )

    def list_candidate_matches(self) -> Iterable[str]:
        """Files below the constant part of a query with wildcards."""
        prefix = get_constant_prefix(self.query, strip_incomplete_parts=True)
        return list(self.provider.place.siblings(f"{prefix.rstrip('/')}/"))


def local_suffix(url: str) -> str:
    """Local path of a URL below the prefix of the storage."""
    parts = urlparse(url)
    return f"{parts.netloc.replace(':', '_')}/{parts.path.lstrip('/')}"
