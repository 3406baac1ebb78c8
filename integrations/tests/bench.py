"""Runs three workflows with Snakemake on this machine and on a local BAFS cluster, and compares.

One line of JSON, in the words of the project's other benchmarks:

  workflows, identical   workflows that ran, and those whose results are equal byte by byte
  home_read_ratio        bytes that left the submitting machine ÷ bytes of all inputs and sources
  vs_local_snakemake     time on BAFS ÷ time of `snakemake --cores N`, N = slots of the cluster
  overhead_ms_per_job    (time on BAFS - that of the same processes without BAFS) ÷ small jobs

The last one compares with a loop that starts the same `snakemake` command for each job on as many
processors, because each executor for clusters starts Snakemake once for each job.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

from bafs import LocalCluster

HERE = Path(__file__).resolve().parent
NODES = 4


def load_tests() -> ModuleType:
    """The tests of the executor, which have the workflows and their data."""
    path = HERE.parent / "snakemake-executor-plugin-bafs/tests/test_workflows.py"
    spec = importlib.util.spec_from_file_location("executor_tests", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(action: Callable[..., object], *arguments: object) -> float:
    """Time of an action."""
    began = time.monotonic()
    action(*arguments)
    return time.monotonic() - began


def start_each_job(directory: Path, count: int) -> float:
    """Time of the bare processes: one Snakemake for each small job, one at a time per node."""

    def start(number: int) -> None:
        words = [sys.executable, "-m", "snakemake", "--snakefile", "Snakefile", "--force"]
        words += ["--target-jobs", f"square:number={number}", "--allowed-rules", "square"]
        words += ["--cores", "all", "--mode", "remote", "--shared-fs-usage", "none", "--nolock"]
        words += ["--config", f"count={count}", "--nocolor"]
        subprocess.run(words, cwd=directory, check=True, capture_output=True)

    with ThreadPoolExecutor(NODES) as pool:
        return seconds(lambda: list(pool.map(start, range(1, count + 1))))


def main() -> None:
    """Runs the benchmark and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500, help="small jobs")
    parser.add_argument("--json", action="store_true", help="accepted; the output is JSON")
    jobs = parser.parse_args().jobs
    tests = load_tests()
    variables = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    with tempfile.TemporaryDirectory(prefix="bafs-bench-") as name:
        base = Path(name)
        (base / "home").mkdir()
        with LocalCluster(base / "home", NODES, node_size="8GB", environment=variables) as cluster:
            print(json.dumps(measure(tests, base, cluster, jobs)))


def measure(tests: ModuleType, base: Path, cluster: LocalCluster, jobs: int) -> dict[str, Any]:
    """Runs each workflow twice."""
    totals = {"home_read_bytes": 0, "home_unique_bytes": 0}
    identical, local_s, bafs_s, details = 0, 0.0, 0.0, {}
    for name in ("tutorial", "fan", "small"):
        here, there = base / name / "here", base / name / "there"
        tests.make_workflow(name, here)
        options: list[str] = []
        if name == "small":
            (here / "data").mkdir()
            (here / "data/table.txt").write_text("".join(f"row{n}\n" for n in range(jobs)))
            options = ["--config", f"count={jobs}"]
        else:
            tests.make_reads(here, "ABC", is_indexed=name == "tutorial")
        if name == "tutorial":
            options = ["--set-threads", "map_reads=1"]
        shutil.copytree(here, there)
        sources = ["--bafs-sources", "data/genome.fa.*"] if name == "tutorial" else []
        plugin = [*tests.bafs_options(cluster, 1000), *sources]
        there_s = seconds(tests.snakemake, there, *plugin, *options)
        here_s = seconds(tests.snakemake, here, "--cores", str(NODES), *options)
        is_same = tests.results(there) == tests.results(here)
        identical += is_same
        local_s, bafs_s = local_s + here_s, bafs_s + there_s
        summary = json.loads((there / ".snakemake/bafs/summary.json").read_text())
        for key in totals:
            totals[key] += summary[key]
        details[name] = {**summary, "identical": is_same, "local_s": here_s, "bafs_s": there_s}
    bare_s = start_each_job(base / "small/here", jobs)
    overhead_s = details["small"]["bafs_s"] - bare_s
    return {
        "workflows": len(details),
        "identical": identical,
        "home_read_ratio": round(totals["home_read_bytes"] / totals["home_unique_bytes"], 3),
        "vs_local_snakemake": round(bafs_s / local_s, 2),
        "overhead_ms_per_job": round(1000 * overhead_s / jobs, 1),
        "small_jobs": jobs,
        "bare_processes_s": round(bare_s, 1),
        "details": details,
    }


if __name__ == "__main__":
    main()
