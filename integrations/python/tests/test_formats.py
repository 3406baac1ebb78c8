"""Formats of other systems, by these systems' own programs: ClassAds and WfFormat.

They need `integrations/tests/requirements-formats.txt`. No daemons of HTCondor are in the
registries: its plug-in is tested by contract, with the real parser of ClassAds.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bafs import LocalCluster, find_program

RECIPES = [
    "Blast", "Bwa", "Cycles", "Epigenomics", "Genome",
    "Montage", "Rnaseq", "Seismology", "Soykb", "Srasearch",
]

ENVIRONMENT = """
home-rate = "100 MB/s"
local-rate = "100 MB/s"
[[nodes]]
count = 8
cpus = 4
storage = "500 GB"
"""


def run(*words: str, cwd: Path) -> str:
    environment = {**os.environ, "BAFS_CONFIG": ""}
    done = subprocess.run(
        [find_program(), *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
    return done.stdout


def make_instance(tasks: list[tuple[str, float, list[str], list[str]]]) -> dict[str, Any]:
    """WfFormat of tasks: id, run time, inputs, outputs. All files have 1 GB."""
    writers = {file: task for task, _, _, outputs in tasks for file in outputs}
    specified = [
        {
            "id": task,
            "parents": sorted({writers[file] for file in inputs if file in writers}),
            "children": [],
            "inputFiles": inputs,
            "outputFiles": outputs,
        }
        for task, _, inputs, outputs in tasks
    ]
    files = {file for _, _, inputs, outputs in tasks for file in [*inputs, *outputs]}
    executed = [{"id": task, "runtimeInSeconds": seconds} for task, seconds, _, _ in tasks]
    sizes = [{"id": file, "sizeInBytes": 1_000_000_000} for file in sorted(files)]
    specification = {"tasks": specified, "files": sizes}
    workflow = {"specification": specification, "execution": {"tasks": executed}}
    return {"schemaVersion": "1.5", "workflow": workflow}


def make_pattern(name: str) -> dict[str, Any]:
    """A pattern that WOW is evaluated with: 99 writers, and readers of their files."""
    count = 99
    width = {"chain": 1, "group": 3, "group-multiple": 3, "all-in-one": count}
    if name == "fork":
        tasks = [("a", 10.0, [], ["f"])]
        tasks += [(f"b{at}", 10.0, ["f"], [f"r{at}"]) for at in range(count)]
        return make_instance(tasks)
    tasks = [(f"a{at}", 10.0, [], [f"f{at}"]) for at in range(count)]
    files = [f"f{at}" for at in range(count)]
    groups = [files[at : at + width[name]] for at in range(0, count, width[name])]
    if name == "group-multiple":
        groups += [files[at::33] for at in range(33)]
    tasks += [(f"b{at}", 10.0, group, [f"r{at}"]) for at, group in enumerate(groups)]
    return make_instance(tasks)


def simulate_placements(directory: Path, name: str, jobs: int) -> None:
    """Prints the makespan under our placement and under that of WOW, and their ratio."""
    (directory / "e.toml").write_text(ENVIRONMENT)
    seconds = {}
    for placement in ("capacity", "wow"):
        words = ("sim", "w.json.bafs", "--trace", "w.csv", "--environment", "e.toml")
        words += ("--strategy", "need", "--policy", f"placement={placement}")
        result: Any = json.loads(run("--json", *words, cwd=directory))
        seconds[placement] = result["runs"][0]["simulated_s"]
        assert seconds[placement] is not None
    ratio = seconds["wow"] / seconds["capacity"]
    times = f"{seconds['capacity']:.1f} {seconds['wow']:.1f} {ratio:.3f}"
    print(f"\nMAKESPAN {name} {jobs} {times}")


@pytest.mark.parametrize("name", ["all-in-one", "chain", "fork", "group", "group-multiple"])
def test_patterns_are_simulated(name: str, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(json.dumps(make_pattern(name)))
    words = ("--json", "import", "wfformat", "w.json", "--trace", "w.csv")
    simulate_placements(tmp_path, name, json.loads(run(*words, cwd=tmp_path))["jobs"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_generated_instances_are_simulated(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("wfcommons")
    import numpy
    from wfcommons import WorkflowGenerator
    from wfcommons.wfchef import recipes

    random.seed(recipe)
    numpy.random.seed(7)
    kind = getattr(recipes, f"{recipe}Recipe")
    instance = WorkflowGenerator(kind.from_num_tasks(200)).build_workflow()
    instance.write_json(tmp_path / "w.json")
    said = json.loads(
        run("--json", "import", "wfformat", "w.json", "--trace", "w.csv", cwd=tmp_path)
    )
    assert said["jobs"] == len(instance.nodes)
    assert {total["role"] for total in said["roles"]} <= {"batch", "pipeline", "endpoint"}
    run("check", "w.json.bafs", cwd=tmp_path)
    simulate_placements(tmp_path, recipe, said["jobs"])


def call_plugin(
    cluster: LocalCluster, scratch: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cluster.cluster.environment, "BAFS_CONFIG": ""}
    return subprocess.run(
        [find_program(), *words], cwd=scratch, env=environment, capture_output=True, text=True
    )


def test_condor_reads_the_capabilities(cluster: LocalCluster, tmp_path: Path) -> None:
    classad2 = pytest.importorskip("classad2")
    said = call_plugin(cluster, tmp_path, "-classad")
    ad = classad2.parseOne(said.stdout)
    assert ad["PluginType"] == "FileTransfer"
    assert ad["MultipleFileSupport"] is True
    assert ad["ProtocolVersion"] == 4
    assert "bafs" in ad["SupportedMethods"].split(",")


def test_condor_reads_the_results(cluster: LocalCluster, tmp_path: Path) -> None:
    classad2 = pytest.importorskip("classad2")
    odd = 'odd "name"\\ü.txt'
    (tmp_path / odd).write_text("text\n")
    requests = [
        {"LocalFileName": str(tmp_path / odd), "Url": "bafs://home/condor//one"},
        {"LocalFileName": "missing", "Url": 'bafs://home/condor/"two"\n'},
    ]
    ads = [classad2.ClassAd(request) for request in requests]
    ads[0]["Extra"] = classad2.ExprTree('ifThenElse(a =?= undefined, {1, [b = "]"]}, "x;")')
    (tmp_path / "in").write_text("\n".join(str(ad) for ad in ads))
    # HTCondor reserves the space of the results.
    (tmp_path / "out").write_text(" " * 20_000)
    done = call_plugin(cluster, tmp_path, "-infile", "in", "-outfile", "out", "-upload")
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "out").stat().st_size == 20_000
    results = (tmp_path / "out").read_text()
    assert results.count("TransferUrl") == 2, results.strip()
    good, bad = classad2.parseAds(results)
    assert good["TransferSuccess"] is True and good["TransferFileBytes"] == 5
    assert good["TransferFileName"] == odd
    assert bad["TransferSuccess"] is False and bad["TransferUrl"] == requests[1]["Url"]
    assert bad["TransferError"].startswith("bafs: ")
    back = {"Url": requests[0]["Url"], "LocalFileName": "back"}
    (tmp_path / "in").write_text(str(classad2.ClassAd(back)))
    done = call_plugin(cluster, tmp_path, "-infile", "in", "-outfile", "out2")
    assert done.returncode == 0, (tmp_path / "out2").read_text()
    assert (tmp_path / "back").read_text() == "text\n"
