"""The test suite of Snakemake's storage interface, on a local cluster of four nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Optional, Type

import pytest
from bafs import LocalCluster
from snakemake_interface_storage_plugins.settings import StorageProviderSettingsBase
from snakemake_interface_storage_plugins.storage_provider import StorageProviderBase
from snakemake_interface_storage_plugins.tests import TestStorageBase
from snakemake_storage_plugin_bafs import StorageProvider, StorageProviderSettings

CLUSTER: list[LocalCluster] = []


@pytest.fixture(autouse=True, scope="module")
def use_cluster(cluster: LocalCluster) -> Iterator[None]:
    CLUSTER.append(cluster)
    yield
    CLUSTER.clear()


class StorageTests(TestStorageBase):
    def get_storage_provider_cls(self) -> Type[StorageProviderBase]:
        return StorageProvider

    def get_query(self, tmp_path: Path) -> str:
        return "bafs://home/some/path/test.txt"

    def get_query_not_existing(self, tmp_path: Path) -> str:
        return "bafs://home/some/path/absent.txt"


class TestStorageByTheCluster(StorageTests):
    """From any machine. The program cannot remove files of a home."""

    __test__ = True
    delete = False

    def get_storage_provider_settings(self) -> Optional[StorageProviderSettingsBase]:
        cluster = CLUSTER[0].cluster
        return StorageProviderSettings(identity=cluster.identity, catalog=cluster.catalog)


class TestStorageByTheExport(StorageTests):
    """On the machine of the home server."""

    __test__ = True

    def get_storage_provider_settings(self) -> Optional[StorageProviderSettingsBase]:
        return StorageProviderSettings(export=str(CLUSTER[0].export))

    def test_removed_files_are_gone(self, tmp_path: Path) -> None:
        obj = self._get_obj(tmp_path, "bafs://home/some/removed.txt")
        obj.local_path().parent.mkdir(parents=True)
        obj.local_path().write_text("x")
        obj.store_object()
        assert obj.exists()
        obj.remove()
        assert not obj.exists()
