"""The module on a local cluster of four nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable

import bafs
import pytest
from bafs import Cluster, Job, LocalCluster, Mount, Workflow


@pytest.fixture
def it(cluster: LocalCluster) -> Cluster:
    return cluster.cluster


def test_the_cluster_lists_its_nodes(it: Cluster) -> None:
    assert sorted(node.name for node in it.nodes()) == ["n1", "n2", "n3", "n4"]
    assert {server.kind for server in it.servers()} == {"home", "node"}


def test_a_volume_lives_from_create_to_delete(it: Cluster) -> None:
    volume = it.create_scratch("life", 5_000_000, node="n2", files=100, lifetime_hours=1)
    assert (volume.node, volume.state, volume.size_bytes) == ("n2", "ready", 5_000_000)
    assert volume in it.volumes()
    it.delete(volume)
    with pytest.raises(bafs.VolumeNotFound):
        it.volume("life")


def test_put_files_come_back_by_get(it: Cluster, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("content")
    volume = it.create_scratch("files", "1 MB")
    try:
        it.put(tmp_path / "tree", volume, "a/b")
        assert it.stat(volume, "a/b/file") is not None
        status = it.stat(volume, "a/b/file")
        assert status is not None and status.size_bytes == 7 and not status.is_directory
        assert it.stat(volume, "absent") is None
        it.get(volume, "a/b", tmp_path / "back")
        assert (tmp_path / "back/file").read_text() == "content"
        with pytest.raises(FileNotFoundError):
            it.get(volume, "absent", tmp_path / "x")
        with pytest.raises(ValueError):
            it.put(tmp_path / "tree", volume, "../outside")
    finally:
        it.delete(volume)


def test_extracted_files_reach_home(it: Cluster, cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("result")
    volume = it.create_scratch("results", "1 MB")
    it.put(tmp_path / "file", volume, "out")
    receipt = it.extract(volume, "out", "bafs://home/results/out")
    assert receipt.size_bytes == 6
    assert (cluster.export / "results/out").read_text() == "result"
    it.delete(volume)


def test_home_files_are_stored_listed_and_read(it: Cluster, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(300_000))
    it.put_home(tmp_path / "big", "bafs://home/stored/deep/big")
    assert it.list_home("bafs://home/stored")["deep/big"].size_bytes == 300_000
    status = it.stat_home("bafs://home/stored/deep/big")
    assert status is not None and status.size_bytes == 300_000
    assert it.stat_home("bafs://home/stored/absent") is None
    assert it.list_home("bafs://home/absent") == {}
    it.get_home("bafs://home/stored/deep/big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "big").read_bytes()
    assert it.volumes() == []


def test_an_unknown_home_is_no_absent_file(it: Cluster) -> None:
    with pytest.raises(bafs.BafsError):
        it.stat_home("bafs://no-such-home/file")


def test_replicas_share_their_name(it: Cluster) -> None:
    first = it.create_scratch("twice", "1 MB", node="n1")
    second = it.replicate(first, "n2")
    with pytest.raises(bafs.AmbiguousVolume):
        it.volume("twice")
    it.delete(first)
    it.delete(second)


def test_exec_gives_output_and_exit_code(it: Cluster) -> None:
    volume = it.create_scratch("exec", "1 MB")
    words = ["sh", "-c", "echo out; echo err >&2; echo x > /scratch/file; exit 3"]
    done = it.exec(words, {"/scratch": volume}, check=False)
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert "err\n" in done.stderr
    with pytest.raises(subprocess.CalledProcessError):
        it.exec(["false"], {"/scratch": volume})
    it.delete(volume)


def test_a_missing_volume_has_reason_and_class(it: Cluster) -> None:
    with pytest.raises(bafs.EnvironmentFailed) as caught:
        it.exec(["true"], {"/x": "no-such-volume"})
    assert (caught.value.reason, caught.value.code) == ("NotFound", 402)
    assert caught.value.error_class == "Invalid"
    assert caught.value.exit_code == 75


def test_wrong_words_are_usage_errors(it: Cluster) -> None:
    with pytest.raises(bafs.UsageError) as caught:
        it.create_scratch("bad", "5 Mb")
    assert caught.value.exit_code == 2


def two_jobs() -> Workflow:
    workflow = Workflow()
    workflow.cache("db", "bafs://home/db", "1 MB")
    workflow.scratch("work", "1 MB", files=100)
    mounts = [Mount("db", "/db", "ro"), Mount("work", "/data")]
    text = "cat /db/it\\'s > '/data/a b'; echo \"$X $(echo sub)\""
    workflow.add(
        Job("first", "sh", ["-c", text], environment={"X": "a b"}, mounts=mounts, runtime=60)
    )
    workflow.add(
        Job("second", "wc", ["-c", "a b"], output="size", mounts=[mounts[1]], after=["first"])
    )
    workflow.extract("work", "size", "bafs://home/out/size")
    return workflow


def test_a_built_workflow_runs(it: Cluster, cluster: LocalCluster, tmp_path: Path) -> None:
    (cluster.export / "db").mkdir()
    (cluster.export / "db/it's").write_text("12345")
    path = tmp_path / "two.bafs"
    two_jobs().write(path)
    assert bafs.check(path) == {"extracts": 1, "jobs": 2, "volumes": 2}
    run = it.start(path)
    assert run.wait(60)["outcome"] == "Complete"
    assert (cluster.export / "out/size").read_text() == "5 a b\n"
    assert run.logs("first").stdout == "a b sub\n"
    progress = run.progress()
    assert {job.state for job in progress.jobs.values()} == {"done"}
    assert progress.delivered == {"bafs://home/out/size"}
    assert run.why("first")[-1].subjects[0] == "first"
    assert run.status()["progress"]["jobs_done"] == 2
    run.write_report(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()


def test_a_failed_run_names_its_job(it: Cluster, tmp_path: Path) -> None:
    workflow = Workflow()
    workflow.add(Job("bad", "sh", ["-c", "echo no >&2; exit 4"]))
    workflow.write(tmp_path / "bad.bafs")
    run = it.start(tmp_path / "bad.bafs")
    with pytest.raises(bafs.RunFailed) as caught:
        run.wait(60)
    assert caught.value.outcome["Failed"]["jobs"][0]["name"] == "bad"
    assert run.progress().jobs["bad"].end_description == "exit code 4"
    assert run.logs("bad").stderr == "no\n"


def test_a_cancelled_run_leaves_no_volume(it: Cluster, tmp_path: Path) -> None:
    workflow = Workflow()
    workflow.scratch("w", "1 MB")
    workflow.add(Job("long", "sleep", ["300"], mounts=[Mount("w", "/w")]))
    workflow.write(tmp_path / "long.bafs")
    run = it.start(tmp_path / "long.bafs")
    while not any(node.jobs for node in it.nodes()):
        assert run.is_active
    run.cancel()
    assert run.exit_code == 1
    assert it.volumes() == []


def test_a_run_ends_with_its_owner(it: Cluster, tmp_path: Path) -> None:
    workflow = Workflow()
    workflow.add(Job("long", "sleep", ["300"]))
    workflow.write(tmp_path / "long.bafs")
    text = f"import bafs; run = bafs.Cluster().start({str(tmp_path / 'long.bafs')!r}); run.wait()"
    owner = subprocess.Popen([sys.executable, "-c", text], env={**os.environ, **it.environment})
    while not any(node.jobs for node in it.nodes()):
        assert owner.poll() is None
    owner.kill()
    owner.wait()
    journal = bafs.RunJournal(tmp_path / "long.bafs")
    wait_until(lambda: journal.progress().outcome is not None)
    assert journal.progress().outcome == "Cancelled"


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_errors_of_a_workflow_have_a_line(tmp_path: Path) -> None:
    (tmp_path / "bad.bafs").write_text("job a {\n  executble = sh\n}\n")
    with pytest.raises(bafs.WorkflowError, match="bad.bafs:2:3"):
        bafs.check(tmp_path / "bad.bafs")


def test_words_with_line_breaks_are_rejected() -> None:
    with pytest.raises(ValueError):
        Workflow().add(Job("a", "sh", ["-c", "a\nb"]))


def test_a_cluster_ends_with_its_block(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, nodes=1) as local:
        pids = [server.pid for server in local.processes.values()]
        directory = local.directory
    assert not directory.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_cluster_needs_identity_and_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAFS_CATALOG", raising=False)
    with pytest.raises(bafs.BafsError, match="BAFS_CATALOG"):
        Cluster("somewhere")


def test_a_wrong_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAFS_BIN", "/no/such/program")
    with pytest.raises(bafs.ProgramNotFound, match="/no/such/program"):
        bafs.find_program()
