"""One local cluster for all tests of a session: four nodes, each a process, without a shared
directory: a job sees its own volume where this machine has the working directory."""

import os
import sys
from pathlib import Path
from typing import Iterator

import pytest
from bafs import LocalCluster

NODES = 4


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster whose nodes have the Python of the tests on their PATH."""
    export = tmp_path_factory.mktemp("home")
    bin_directory = str(Path(sys.executable).parent)
    variables = {"PATH": os.pathsep.join([bin_directory, os.environ["PATH"]])}
    with LocalCluster(export, NODES, node_size="8GB", metrics=True, environment=variables) as it:
        yield it
