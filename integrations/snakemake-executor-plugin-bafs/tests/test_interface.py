"""The test suite of Snakemake's executor interface, on a local cluster of four nodes."""

from typing import Iterator, Optional

import pytest
import snakemake.common.tests
from bafs import LocalCluster
from snakemake_executor_plugin_bafs import ExecutorSettings
from snakemake_interface_executor_plugins.settings import ExecutorSettingsBase

CLUSTER: list[LocalCluster] = []


@pytest.fixture(autouse=True, scope="module")
def use_cluster(cluster: LocalCluster) -> Iterator[None]:
    CLUSTER.append(cluster)
    yield
    CLUSTER.clear()


class TestWorkflows(snakemake.common.tests.TestWorkflowsLocalStorageBase):
    __test__ = True

    def get_executor(self) -> str:
        return "bafs"

    def get_assume_shared_fs(self) -> bool:
        return False

    def get_executor_settings(self) -> Optional[ExecutorSettingsBase]:
        cluster = CLUSTER[0].cluster
        return ExecutorSettings(identity=cluster.identity, catalog=cluster.catalog)
