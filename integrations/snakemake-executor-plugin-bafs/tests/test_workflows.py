"""Workflows give on BAFS what they give on this machine alone."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bafs import LocalCluster

WORKFLOWS = Path(__file__).with_name("workflows")

#: Small jobs of the third workflow. Most of their time is the start of Snakemake on the node.
SMALL_JOBS = int(os.environ.get("BAFS_SNAKEMAKE_JOBS", "40"))

#: Lines of results that hold the date of the run.
DATED_LINE = re.compile(rb"^##bcftools_\w+Command=.*$", re.MULTILINE)


def need_tools(*names: str) -> None:
    """Skips a test whose programs are not installed; run.sh repeats the reason at its end."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian has packages of these names)")


def snakemake(directory: Path, *options: str, check: bool = True) -> subprocess.CompletedProcess:
    """Runs Snakemake in a directory."""
    words = [sys.executable, "-m", "snakemake", "--nocolor", *options]
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=3600)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def bafs_options(cluster: LocalCluster, jobs: int = 100) -> list[str]:
    """Options that run a workflow on the cluster of the tests."""
    it = cluster.cluster
    options = ["--executor", "bafs", "--jobs", str(jobs)]
    return [*options, "--bafs-identity", it.identity, "--bafs-catalog", it.catalog]


def make_workflow(name: str, directory: Path) -> Path:
    """A copy of a workflow of this test, without data."""
    shutil.copytree(WORKFLOWS / name, directory)
    return directory


def results(directory: Path) -> dict[str, bytes]:
    """All files that a run left, without those of Snakemake, the benchmarks and the logs."""
    found = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_file() and not name.startswith((".snakemake", "benchmarks", "logs")):
            found[name] = DATED_LINE.sub(b"", path.read_bytes())
    return found


def make_reads(directory: Path, samples: str, is_indexed: bool) -> None:
    """A genome of random bases, and reads of it with mutations, always the same."""
    data = directory / "data"
    (data / "samples").mkdir(parents=True)
    bases = random.Random(1)
    with open(data / "genome.fa", "w") as genome:
        genome.write(">I\n")
        for _ in range(3000):
            genome.write("".join(bases.choice("ACGT") for _ in range(70)) + "\n")
    for seed, sample in enumerate(samples, start=1):
        reads = f"samples/{sample}.fastq"
        wgsim = ["wgsim", "-N", "3000", "-S", str(seed), "genome.fa", reads, os.devnull]
        subprocess.run(wgsim, cwd=data, check=True, capture_output=True)
    if is_indexed:
        subprocess.run(["bwa", "index", "genome.fa"], cwd=data, check=True, capture_output=True)
        subprocess.run(["samtools", "faidx", "genome.fa"], cwd=data, check=True)


def test_the_tutorial_gives_the_same_results(cluster: LocalCluster, tmp_path: Path) -> None:
    need_tools("bwa", "samtools", "bcftools", "wgsim")
    here = make_workflow("tutorial", tmp_path / "here")
    make_reads(here, "ABC", is_indexed=True)
    there = tmp_path / "there"
    shutil.copytree(here, there)
    # The commands are part of the results, with the number of threads.
    snakemake(here, "--cores", "2", "--set-threads", "map_reads=1")
    sources = ["--bafs-sources", "data/genome.fa.*"]
    snakemake(there, *bafs_options(cluster), *sources, "--set-threads", "map_reads=1")
    assert results(there) == results(here)
    assert "mapped/A.bam" not in results(there)
    assert not os.access(there / "sorted/A.bam", os.W_OK) or os.geteuid() == 0
    assert "[M::mem_process_seqs]" in (there / "logs/map/A.log").read_text()
    assert (there / "benchmarks/call.tsv").read_text().startswith("s\t")
    again = snakemake(there, *bafs_options(cluster), *sources, "--dry-run")
    assert "Nothing to be done" in again.stdout + again.stderr


def test_fan_out_and_fan_in_give_the_same_results(cluster: LocalCluster, tmp_path: Path) -> None:
    need_tools("bwa", "samtools", "wgsim")
    here = make_workflow("fan", tmp_path / "here")
    make_reads(here, "A", is_indexed=False)
    there = tmp_path / "there"
    shutil.copytree(here, there)
    snakemake(here, "--cores", "2")
    snakemake(there, *bafs_options(cluster))
    assert results(there) == results(here)
    again = snakemake(there, *bafs_options(cluster), "--dry-run")
    assert "Nothing to be done" in again.stdout + again.stderr


def test_many_small_jobs_give_the_same_results(cluster: LocalCluster, tmp_path: Path) -> None:
    here = make_workflow("small", tmp_path / "here")
    (here / "data").mkdir()
    (here / "data/table.txt").write_text("".join(f"row{n}\n" for n in range(SMALL_JOBS)))
    there = tmp_path / "there"
    shutil.copytree(here, there)
    config = ["--config", f"count={SMALL_JOBS}"]
    began = time.monotonic()
    snakemake(here, "--cores", "4", *config)
    local_s = time.monotonic() - began
    snakemake(there, *bafs_options(cluster, 1000), *config)
    bafs_s = time.monotonic() - began - local_s
    print(f"{SMALL_JOBS} small jobs: {local_s:.1f} s here, {bafs_s:.1f} s on BAFS")
    assert results(there) == results(here)


def write_snakefile(directory: Path, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "Snakefile").write_text(text)
    return directory


def test_a_failed_job_reports_node_output_and_log(cluster: LocalCluster, tmp_path: Path) -> None:
    text = """
rule all:
    input: "good", "bad"
rule good:
    output: "good"
    shell: "sleep 2; echo fine > {output}"
rule bad:
    output: "bad"
    log: "logs/bad.log"
    shell: "echo half > {output}; echo why-it-failed > {log}; echo seen-on-stderr >&2; exit 7"
"""
    directory = write_snakefile(tmp_path / "w", text)
    done = snakemake(directory, *bafs_options(cluster), "--show-failed-logs", check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert re.search(r"BAFS job bad\.\d+ on node n\d: exit code 1", said), said
    assert "seen-on-stderr" in said
    assert "bafs why" in said
    assert (directory / "logs/bad.log").read_text() == "why-it-failed\n"
    assert (directory / "good").read_text() == "fine\n"
    assert not (directory / "bad").exists()


def test_jobs_see_only_what_they_declare(cluster: LocalCluster, tmp_path: Path) -> None:
    text = """
rule show:
    input: "declared"
    output: "seen"
    shell: "ls > {output}"
"""
    directory = write_snakefile(tmp_path / "w", text)
    (directory / "declared").write_text("a")
    (directory / "undeclared").write_text("b")
    snakemake(directory, *bafs_options(cluster))
    assert (directory / "seen").read_text().split() == ["Snakefile", "declared", "seen"]


def test_inputs_above_the_working_directory_travel(cluster: LocalCluster, tmp_path: Path) -> None:
    text = """
rule copy:
    input: "../reference/genome.fa"
    output: "../shared/copy"
    shell: "cp {input} {output}"
"""
    directory = write_snakefile(tmp_path / "project", text)
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference/genome.fa").write_text("ACGT\n")
    snakemake(directory, *bafs_options(cluster), "--bafs-root", str(tmp_path), "../shared/copy")
    assert (tmp_path / "shared/copy").read_text() == "ACGT\n"


def test_checkpoints_and_updates_see_earlier_results(cluster: LocalCluster, tmp_path: Path) -> None:
    text = """
def parts(wildcards):
    directory = checkpoints.split.get().output[0]
    return expand("done/{n}", n=glob_wildcards(directory + "/{n}.part").n)
rule all:
    input: parts
checkpoint split:
    output: directory("parts")
    shell: "mkdir {output}; touch {output}/1.part {output}/2.part"
rule use:
    input: "parts/{n}.part"
    output: "done/{n}"
    run:
        with open(output[0], "w") as file:
            file.write(wildcards.n)
"""
    directory = write_snakefile(tmp_path / "w", text)
    snakemake(directory, *bafs_options(cluster))
    assert (directory / "done/2").read_text() == "2"


def test_retries_run_with_the_next_attempt(cluster: LocalCluster, tmp_path: Path) -> None:
    text = """
rule once:
    output: "out"
    resources: tries=lambda wildcards, attempt: attempt
    retries: 1
    shell: "test {resources.tries} = 2 && echo {resources.tries} > {output}"
"""
    directory = write_snakefile(tmp_path / "w", text)
    snakemake(directory, *bafs_options(cluster))
    assert (directory / "out").read_text() == "2\n"


def test_updated_files_keep_their_content(cluster: LocalCluster, tmp_path: Path) -> None:
    text = """
rule append:
    input: "new"
    output: update("log.txt")
    shell: "cat {input} >> {output}"
"""
    directory = write_snakefile(tmp_path / "w", text)
    (directory / "log.txt").write_text("old\n")
    time.sleep(0.1)
    (directory / "new").write_text("new\n")
    snakemake(directory, *bafs_options(cluster))
    assert (directory / "log.txt").read_text() == "old\nnew\n"


def test_a_lost_node_costs_no_job(tmp_path: Path) -> None:
    text = """
rule wait:
    output: "out"
    shell: "sleep 5; echo done > {output}"
"""
    directory = write_snakefile(tmp_path / "w", text)
    (tmp_path / "home").mkdir()
    variables = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    with LocalCluster(tmp_path / "home", 2, environment=variables) as cluster:
        words = [sys.executable, "-m", "snakemake", *bafs_options(cluster)]
        process = subprocess.Popen(words, cwd=directory)
        nodes = cluster.cluster.nodes
        wait_until(lambda: any(node.jobs for node in nodes()))
        busy = next(node.name for node in nodes() if node.jobs)
        cluster.processes[busy].kill()
        assert process.wait(120) == 0
    assert (directory / "out").read_text() == "done\n"


def test_an_interrupted_workflow_leaves_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    text = """
rule sleep:
    output: "out"
    shell: "sleep 300; touch {output}"
"""
    directory = write_snakefile(tmp_path / "w", text)
    words = [sys.executable, "-m", "snakemake", *bafs_options(cluster)]
    process = subprocess.Popen(
        words, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    nodes = cluster.cluster.nodes
    wait_until(lambda: any(node.jobs for node in nodes()))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    wait_until(lambda: not any(node.jobs for node in nodes()))
    assert cluster.cluster.volumes() == []
    assert not (directory / ".snakemake/bafs/home").exists()
    # The catalog forgets a server after a few seconds.
    servers = cluster.cluster.servers
    wait_until(lambda: [s.name for s in servers() if s.kind == "home"] == ["home"])


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.3)
