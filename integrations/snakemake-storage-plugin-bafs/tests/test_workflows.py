"""Workflows whose files are in a home, on the executor of BAFS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bafs import LocalCluster

TEXT = """
rule all:
    input: "words/all.txt"
rule count:
    input: "data/{letter}.txt"
    output: "words/{letter}.txt"
    log: "logs/{letter}.log"
    shell: "wc -c < {input} > {output} 2> {log}"
rule join:
    input: expand("words/{letter}.txt", letter=list("abc"))
    output: "words/all.txt"
    shell: "cat {input} > {output}"
"""


@pytest.mark.parametrize("has_export", [False, True])
def test_default_storage_keeps_all_files_at_home(
    cluster: LocalCluster, tmp_path: Path, has_export: bool
) -> None:
    project = cluster.export / f"project-{has_export}"
    (project / "data").mkdir(parents=True)
    for number, letter in enumerate("abc", start=1):
        (project / "data" / f"{letter}.txt").write_text("x" * number)
    (tmp_path / "Snakefile").write_text(TEXT)
    it = cluster.cluster
    words = [sys.executable, "-m", "snakemake", "--nocolor", "--executor", "bafs", "--jobs", "9"]
    words += ["--bafs-identity", it.identity, "--bafs-catalog", it.catalog]
    words += ["--storage-bafs-identity", it.identity, "--storage-bafs-catalog", it.catalog]
    words += ["--default-storage-provider", "bafs"]
    words += ["--default-storage-prefix", f"bafs://home/{project.name}"]
    words += ["--storage-bafs-export", str(cluster.export)] if has_export else []
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project / "words/all.txt").read_text().split() == ["1", "2", "3"]
    assert (project / "logs/a.log").exists()
    assert not (tmp_path / "words").exists()
