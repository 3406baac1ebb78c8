"""Staging, without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from snakemake_executor_plugin_bafs.staging import Pool, Root, link_inputs


@pytest.fixture
def root(tmp_path: Path) -> Root:
    project = tmp_path / "project"
    (project / "data/deep").mkdir(parents=True)
    (project / "data/a").write_text("a")
    (project / "data/deep/b").write_text("bb")
    return Root(project, project)


def test_a_file_has_one_link_however_often_used(root: Root, tmp_path: Path) -> None:
    pool = Pool(root, tmp_path / "files")
    first = pool.acquire([Path("data/a")])
    changed_ns = os.stat(root.path / "data/a").st_ctime_ns
    second = pool.acquire([Path("data"), Path("data/a")])
    assert os.stat(root.path / "data/a").st_ctime_ns == changed_ns
    assert second == {Path("data/a"), Path("data/deep/b")}
    pool.release(first)
    assert os.stat(root.path / "data/a").st_ctime_ns == changed_ns
    pool.release(second)
    assert not (tmp_path / "files/data/a").exists()
    assert (root.path / "data/a").read_text() == "a"


def test_a_replaced_file_gets_a_new_link(root: Root, tmp_path: Path) -> None:
    pool = Pool(root, tmp_path / "files")
    pool.release(pool.acquire([Path("data/a")]))
    (root.path / "data/a").unlink()
    (root.path / "data/a").write_text("new")
    pool.acquire([Path("data/a")])
    assert (tmp_path / "files/data/a").read_text() == "new"


def test_inputs_are_links_with_the_inputs_time(root: Root, tmp_path: Path) -> None:
    os.utime(root.path / "data/a", (1000, 1000))
    link_inputs(root, [Path("data/a")], tmp_path / "tree")
    link = tmp_path / "tree/data/a"
    assert os.readlink(link) == "/tmp/bafs-inputs/data/a"
    assert os.lstat(link).st_mtime == 1000


def test_files_inside_an_input_directory_come_with_it(root: Root, tmp_path: Path) -> None:
    link_inputs(root, [Path("data/deep/b"), Path("data")], tmp_path / "tree")
    assert os.readlink(tmp_path / "tree/data") == "/tmp/bafs-inputs/data"


def test_only_files_below_the_root_travel(root: Root) -> None:
    assert root.relative("data/a") == Path("data/a")
    assert root.relative("data/../data/a") == Path("data/a")
    assert root.relative("../elsewhere") is None
    assert root.relative("/opt/db") is None
