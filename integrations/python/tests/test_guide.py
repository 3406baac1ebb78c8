"""The examples of the guide run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bafs import LocalCluster

GUIDE = Path(__file__).parents[3] / "docs/guide/python.md"

#: The cluster of the guide's reader.
READERS_CLUSTER = '"/home/ann/cluster", "10.0.0.1:7000"'


def examples() -> list[str]:
    """Examples in Python, without those that need Parsl, which has a test of its own."""
    found = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    return [example for example in found if "parsl" not in example]


def test_examples_of_the_guide_run(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.cluster.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "reads.fa").write_text(">a\nACGT\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/query.fa").write_text(">q\nACGT\n")
    (cluster.export / "db").mkdir(exist_ok=True)
    for number in range(1, 4):
        (cluster.export / f"db/part{number}.fa").write_text(">x\nACGT\n" * number)
    # One after the other: later examples use the names of earlier ones.
    names: dict[str, object] = {}
    for example in examples():
        exec(example.replace(READERS_CLUSTER, ""), names)
    assert (tmp_path / "size.txt").read_text() == "8\n"
    assert (cluster.export / "results/size").read_text() == "8\n"
    assert (cluster.export / "results/count3").read_text() == "3\n"
    assert cluster.cluster.volumes() == []
