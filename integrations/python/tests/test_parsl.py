"""Parsl stages files of a home, on workers without a shared directory for data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bafs import LocalCluster
from bafs.processes import read_metrics

pytest.importorskip("parsl", reason="Parsl is not installed")

SIZE_BYTES = 1_000_000


def test_parsl_tasks_read_and_write_home(cluster: LocalCluster, tmp_path: Path) -> None:
    (cluster.export / "parsl").mkdir()
    (cluster.export / "parsl/words").write_bytes(b"x" * SIZE_BYTES)
    it, metrics = cluster.cluster, cluster.processes["home"].metrics
    assert metrics is not None
    before = read_metrics(metrics)["bafs_home_read_bytes_total"]
    program = Path(__file__).with_name("parsl_program.py")
    done = subprocess.run(
        [sys.executable, program, tmp_path],
        cwd=tmp_path,
        env={**os.environ, **it.environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for number in range(4):
        assert (cluster.export / f"parsl/count.{number}").read_text() == f"{SIZE_BYTES}\n"
    read = read_metrics(metrics)["bafs_home_read_bytes_total"] - before
    # Two workers may begin at once, and each make a cache before it sees the other's.
    assert read <= 2 * SIZE_BYTES
    for volume in it.volumes():
        it.delete(volume)
