"""The HTTP API: its Python client, and what a fuzzer finds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bafs.api
import pytest

from .conftest import Served, make_workflow, start_run, wait_until


def test_client_reads_a_run(ended: Served) -> None:
    client = ended.client()
    (summary,) = client.runs()
    assert (summary.workflow, summary.state) == ("ended", "failed")
    assert (summary.progress.jobs_done, summary.progress.jobs_failed) == (8, 1)
    run = client.run(summary.id)
    assert len(list(run.jobs())) == 9
    assert [job.name for job in run.jobs(state="failed")] == ["bad"]
    assert [job.name for job in run.jobs(search="CHECK1")] == ["check1"]
    bad = run.job("bad")
    assert bad.advice is not None and "input" in bad.advice
    assert bad.executions[-1].end == "exit code 3"
    assert run.logs("bad").stderr == "no such file: input.fa\n"
    assert run.logs("make1", attempt=1).stdout.startswith("<img")
    assert run.job("check1").parents == ["make1"]
    (failure,) = run.failures()
    assert failure.jobs == ["bad"]
    assert {node.name for node in run.nodes()} == {"n1", "n2"}
    assert {volume.name for volume in run.volumes()} == {f"work{n}" for n in range(1, 5)}
    assert run.history()[0].number == 0
    assert {curve["name"] for curve in run.series()["curves"]} >= {"scratch", "slots_used"}
    assert len(run.gantt()["bars"]) >= 9 and len(run.graph()["edges"]) == 4
    assert client.metrics()["gauges"]["run_jobs_done"] == 8
    events = list(run.events(start=0))
    assert isinstance(events[-1], bafs.api.RunSummary) and events[-1].is_over


def test_errors_have_class_and_advice(ended: Served) -> None:
    client = ended.client()
    with pytest.raises(bafs.api.ApiError) as unknown:
        client.run().job("none")
    assert (unknown.value.status, unknown.value.code) == (404, "NotFound")
    assert unknown.value.error_class == "Invalid" and unknown.value.advice
    with pytest.raises(bafs.api.ApiError) as over:
        client.run().hold()
    assert (over.value.status, over.value.code) == (409, "WrongState")
    with pytest.raises(bafs.api.ApiError) as no_queue:
        client.workflows()
    assert no_queue.value.status == 404
    with pytest.raises(bafs.api.ApiError) as stranger:
        bafs.api.Client(client.url, "0" * 64).runs()
    assert (stranger.value.status, stranger.value.error_class) == (401, "Denied")


def test_absent_run_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(bafs.api.NotServed):
        bafs.api.connect(tmp_path / "none.bafs", timeout_s=0.2)


def test_asynchronous_client_follows_and_steers(tmp_path: Path) -> None:
    served = start_run(tmp_path, "async.bafs", make_workflow)
    try:
        blocking = served.client()
        client = bafs.api.AsyncClient(blocking.url, blocking._connection._token)

        async def follow() -> list[bafs.api.RunEvent]:
            run = client.run()
            while not [job for job in await run.jobs(state="active") if job.name == "slow"]:
                await asyncio.sleep(0.2)
            await run.hold("late")
            while not (await run.job("late")).is_held:
                await asyncio.sleep(0.2)
            seen = []
            await run.cancel("slow")
            async for event in run.events(start=0):
                seen.append(event)
            return seen

        # Playwright has a loop of its own in this thread.
        with ThreadPoolExecutor() as threads:
            seen = threads.submit(asyncio.run, follow()).result()
        summaries = [event for event in seen if isinstance(event, bafs.api.RunSummary)]
        assert summaries[-1].state == "failed"
        texts = [event.text for event in seen if isinstance(event, bafs.api.HistoryLine)]
        assert "the user holds the pipeline of job late" in texts
    finally:
        served.stop()


def test_fuzzer_finds_no_failure(ended: Served, tmp_path: Path) -> None:
    """All routes but the stream of events, which has tests of its own; with real names, too."""
    client = ended.client()
    description = client._connection.call("GET", "/openapi.json")
    known = {"run": ["current", "none"], "job": ["make1", "bad", "none"]}
    for operations in description["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in known:
                    parameter["schema"] = {"type": "string", "enum": known[parameter["name"]]}
    (tmp_path / "openapi.json").write_text(json.dumps(description))
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        *("run", str(tmp_path / "openapi.json"), "--url", client.url),
        *("--header", f"Authorization: Bearer {client._connection._token}"),
        *("--exclude-path-regex", "/events$"),
        *("--max-examples", "20", "--generation-deterministic", "--no-color"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
