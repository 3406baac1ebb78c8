"""The file system bafs:// on a local cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import fsspec
import pytest
from bafs import LocalCluster
from bafs.filesystem import BafsFileSystem

fsspec.register_implementation("bafs", BafsFileSystem, clobber=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    export = tmp_path_factory.mktemp("home")
    (export / "data/deep").mkdir(parents=True)
    (export / "data/a.txt").write_text("alpha\n")
    (export / "data/deep/b.txt").write_text("beta\n")
    with LocalCluster(export, 1) as it:
        yield it


def open_system(cluster: LocalCluster, **options: str) -> BafsFileSystem:
    variables = cluster.cluster
    system: BafsFileSystem = fsspec.filesystem(
        "bafs", identity=variables.identity, catalog=variables.catalog, **options
    )
    return system


def test_home_files_are_listed_and_read(cluster: LocalCluster) -> None:
    system = open_system(cluster)
    assert system.ls("bafs://home/data", detail=False) == ["home/data/a.txt", "home/data/deep"]
    assert system.find("bafs://home/data") == ["home/data/a.txt", "home/data/deep/b.txt"]
    assert system.info("bafs://home/data/a.txt")["size"] == 6
    assert system.isdir("home/data/deep") and not system.exists("home/data/none")
    with system.open("bafs://home/data/a.txt", "r") as file:
        assert file.read() == "alpha\n"
    assert system.cat_file("bafs://home/data/deep/b.txt", 1, 3) == b"et"
    with pytest.raises(FileNotFoundError):
        system.open("bafs://home/data/none", "rb")


def test_written_home_file_is_durable(cluster: LocalCluster) -> None:
    system = open_system(cluster)
    with system.open("bafs://home/out/result.txt", "w") as file:
        file.write("result\n")
    assert (cluster.export / "out/result.txt").read_text() == "result\n"
    with pytest.raises(ZeroDivisionError):
        with system.open("bafs://home/out/half.txt", "wb") as file:
            file.write(b"half")
            raise ZeroDivisionError
    assert not (cluster.export / "out/half.txt").exists()
    system.pipe_file("bafs://home/out/bytes", b"\x00\x01")
    assert (cluster.export / "out/bytes").read_bytes() == b"\x00\x01"


def test_volume_files_are_written_and_read(cluster: LocalCluster, tmp_path: Path) -> None:
    volume = cluster.cluster.create_scratch("work", "1 MB")
    try:
        system = open_system(cluster, volume=volume.id)
        system.pipe_file("in/x.bin", b"12345")
        assert system.ls("in", detail=False) == ["in/x.bin"]
        assert system.cat_file("in/x.bin") == b"12345"
        system.get_file("in/x.bin", str(tmp_path / "x.bin"))
        assert (tmp_path / "x.bin").read_bytes() == b"12345"
        assert system.modified("in/x.bin").year >= 2020
    finally:
        cluster.cluster.delete(volume)
