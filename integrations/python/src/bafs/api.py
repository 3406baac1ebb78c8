"""The HTTP API of a run or a service: typed clients, one that waits and one for asyncio.

    client = bafs.api.connect("words.bafs")     # a run of this user: `bafs run --page`, `bafs page`
    run = client.run()
    for job in run.jobs(state="failed"):
        print(job.name, run.job(job.name).reason)

Only the standard library is used. docs/guide/python.md shows more.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, AsyncIterator, Iterator, Mapping, Optional, Sequence, TypeVar, Union
from urllib.parse import quote, urlencode, urlsplit

from .errors import BafsError
from .program import call_json

PathLike = Union[str, "os.PathLike[str]"]

#: Variables that name an API: its address and its token.
URL_VARIABLE = "BAFS_API_URL"
TOKEN_VARIABLE = "BAFS_API_TOKEN"

#: The run that a program serves first, whatever its id is.
CURRENT_RUN = "current"

#: States of a run in which nothing happens any more.
FINAL_STATES = frozenset({"complete", "failed", "cancelled", "interrupted"})

#: States of a workflow in the queue of a service in which nothing happens any more.
FINAL_WORKFLOW_STATES = frozenset({"complete", "failed", "removed"})

#: Rows of a list that the API gives at once.
_PAGE_ROWS = 1000

_PREFIX = "/api/v1"

_Record = TypeVar("_Record")


class ApiError(BafsError):
    """The API rejects a request."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error.get('message')} ({error.get('advice')})")
        #: Status of the response.
        self.status = status
        #: Name of the error code, such as `NotFound`; docs/reference/errors.md lists all.
        self.code: Optional[str] = error.get("code")
        #: `Transient`, `VolumeLost`, `Denied`, `Invalid` or `NoSpace`.
        self.error_class: Optional[str] = error.get("class")
        #: What to do.
        self.advice: Optional[str] = error.get("advice")


class NotServed(BafsError):
    """Nothing answers: no program of this user serves the run, or it has ended."""


def _read(kind: type[_Record], value: Mapping[str, Any]) -> _Record:
    """A record from JSON. Unknown keys are ignored, so that the API may add some."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: item for name, item in value.items() if name in names})


@dataclass(frozen=True)
class RunProgress:
    """How far a run is."""

    jobs_total: int
    jobs_done: int
    jobs_running: int
    jobs_failed: int
    jobs_skipped: int
    attempts: int
    results_total: int
    results_done: int
    results_failed: int
    result_bytes: int
    volumes: int
    nodes: int
    nodes_lost: int


@dataclass(frozen=True)
class RunSummary:
    """A run; `state` is `running`, `held`, `complete`, `failed`, `cancelled` or `interrupted`."""

    id: str
    workflow: str
    state: str
    can_steer: bool
    can_cancel: bool
    began_ms: int
    wall_ms: int
    revision: int
    progress: RunProgress

    @property
    def is_over(self) -> bool:
        """Whether nothing happens any more."""
        return self.state in FINAL_STATES

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunSummary:
        """Reads a summary of the API."""
        return _read(cls, {**value, "progress": _read(RunProgress, value["progress"])})


@dataclass(frozen=True)
class JobSummary:
    """A job; `state` is as `waiting`, `ready`, `active`, `done` or `failed`."""

    name: str
    state: str
    level: int
    pipeline: str
    priority: int
    is_held: bool
    attempts: int
    node: Optional[str]
    started_ms: Optional[int]
    ended_ms: Optional[int]


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job."""

    node: str
    started_ms: int
    ended_ms: Optional[int]
    outcome: str
    end: str
    slots: int
    cpu_ms: int
    waited_ms: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Failure:
    """Jobs that failed for the same reason, and what to do; `jobs` names the first of them."""

    count: int
    jobs: Sequence[str]
    node: str
    reason: str
    advice: str
    output_tail: str


@dataclass(frozen=True)
class JobInfo(JobSummary):
    """A job with all that is known of it; `reason` says why it does not run."""

    reason: Optional[str]
    parents: Sequence[str]
    children: Sequence[str]
    command: Sequence[str]
    executions: Sequence[Attempt]
    advice: Optional[str]


@dataclass(frozen=True)
class JobOutput:
    """What an attempt printed, so far if it runs."""

    job: str
    attempt: int
    attempts: int
    node: str
    is_running: bool
    end: str
    stdout: str
    stderr: str
    is_cut: bool
    missing_reason: Optional[str]


@dataclass(frozen=True)
class WaitGroup:
    """Jobs that wait for the same; `jobs` names the first of them."""

    reason: str
    count: int
    jobs: Sequence[str]


@dataclass(frozen=True)
class NodeInfo:
    """A node of a run."""

    name: str
    is_lost: bool
    slots: int
    jobs: int
    capacity_bytes: int
    reserved_bytes: int
    description: Optional[str]


@dataclass(frozen=True)
class VolumeInfo:
    """A volume of a run; `role` is `scratch`, `cache` or `copy`."""

    name: str
    role: str
    node: str
    bytes: int
    created_ms: Optional[int]
    deleted_ms: Optional[int]
    is_lost: bool


@dataclass(frozen=True)
class HistoryLine:
    """One thing that happened or was decided."""

    number: int
    at_ms: int
    subjects: Sequence[str]
    text: str


@dataclass(frozen=True)
class WorkflowEntry:
    """A workflow in the queue of a service; `details` is for its owner."""

    id: int
    user: Optional[str]
    state: str
    details: Optional[Mapping[str, Any]]

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in FINAL_WORKFLOW_STATES


#: What a run sends while it is followed.
RunEvent = Union[RunSummary, HistoryLine]


class _Connection:
    """Requests to one API, each over a connection of its own: threads may share it."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise BafsError(f"{url!r} is no address of an API, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port
        self._token, self._timeout_s = token, timeout_s

    def open(
        self, method: str, path: str, body: Any = None, timeout_s: Optional[float] = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request. Raises `ApiError` or `NotServed`."""
        headers = {"Authorization": f"Bearer {self._token}", "Connection": "close"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=timeout_s or self._timeout_s
        )
        try:
            connection.request(method, _PREFIX + path, body=data, headers=headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NotServed(f"{self.url} does not answer: {error}") from error
        if response.status >= 400:
            text = response.read()
            connection.close()
            raise ApiError(response.status, _read_error(text))
        return connection, response

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Sends a request and reads the answer."""
        connection, response = self.open(method, path, body)
        try:
            return json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise NotServed(f"{self.url} does not answer: {error}") from error
        finally:
            connection.close()


def _read_error(text: bytes) -> Mapping[str, Any]:
    try:
        error: Mapping[str, Any] = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": text.decode(errors="replace")}
    return error


class RunHandle:
    """A run behind an API."""

    def __init__(self, connection: _Connection, run: str) -> None:
        #: Its id, or `current`.
        self.id = run
        self._connection = connection
        self._path = f"/runs/{quote(run, safe='')}"

    def _get(self, rest: str = "", **parameters: Any) -> Any:
        given = {name: value for name, value in parameters.items() if value is not None}
        query = f"?{urlencode(given)}" if given else ""
        return self._connection.call("GET", self._path + rest + query)

    def _post(self, rest: str, body: Any = None) -> str:
        message: str = self._connection.call("POST", self._path + rest, body)["message"]
        return message

    def _job_path(self, job: str) -> str:
        return f"/jobs/{quote(job, safe='')}"

    def summary(self) -> RunSummary:
        """The run as it is now."""
        return RunSummary.from_json(self._get()["run"])

    def details(self) -> Mapping[str, Any]:
        """Progress, levels, use of time and warnings, as the API gives them."""
        details: Mapping[str, Any] = self._get()
        return details

    def jobs(self, *, state: Optional[str] = None, search: Optional[str] = None) -> Iterator[JobSummary]:
        """The jobs, or those of a state, or with a text in their names."""
        offset = 0
        while True:
            page = self._get("/jobs", state=state, search=search, offset=offset, limit=_PAGE_ROWS)
            yield from (_read(JobSummary, job) for job in page["jobs"])
            offset += len(page["jobs"])
            if offset >= page["total"] or not page["jobs"]:
                return

    def job(self, name: str) -> JobInfo:
        """A job with its attempts, and why it waits."""
        value = self._get(self._job_path(name))
        failure = value["failure"] or {}
        return _read(
            JobInfo,
            {
                **value,
                "command": value["details"]["command"],
                "executions": [_read(Attempt, attempt) for attempt in value["executions"]],
                "advice": failure.get("advice"),
            },
        )

    def logs(self, job: str, attempt: Optional[int] = None) -> JobOutput:
        """What a job printed: in the given attempt, or in the last one, also while it runs."""
        return _read(JobOutput, self._get(self._job_path(job) + "/logs", attempt=attempt))

    def waiting(self) -> list[WaitGroup]:
        """Why jobs wait, the most frequent reason first."""
        return [_read(WaitGroup, group) for group in self._get("/waiting")["groups"]]

    def failures(self) -> list[Failure]:
        """What failed, why, and what to do."""
        return [_read(Failure, group) for group in self._get("/failures")["groups"]]

    def nodes(self) -> list[NodeInfo]:
        """The nodes that the run has seen."""
        return [_read(NodeInfo, node) for node in self._get("/nodes", limit=_PAGE_ROWS)["rows"]]

    def volumes(self) -> list[VolumeInfo]:
        """The volumes of the run, existing ones first."""
        rows = self._get("/volumes", limit=_PAGE_ROWS)["rows"]
        return [_read(VolumeInfo, volume) for volume in rows]

    def gantt(self) -> Mapping[str, Any]:
        """Attempts by node and time."""
        chart: Mapping[str, Any] = self._get("/gantt")
        return chart

    def series(self, points: int = 240) -> Mapping[str, Any]:
        """Slots, space and links over time."""
        series: Mapping[str, Any] = self._get("/series", points=points)
        return series

    def graph(self) -> Mapping[str, Any]:
        """Jobs and dependencies."""
        graph: Mapping[str, Any] = self._get("/graph")
        return graph

    def history(self, offset: int = 0, limit: int = _PAGE_ROWS) -> list[HistoryLine]:
        """What happened, in words, from a line on."""
        page = self._get("/history", offset=offset, limit=limit)
        return [_read(HistoryLine, line) for line in page["lines"]]

    def events(self, start: Optional[int] = None, timeout_s: float = 60.0) -> Iterator[RunEvent]:
        """The run as it goes on: summaries and lines of its history, until it is over.

        Raises `NotServed` if nothing is heard for `timeout_s`.
        """
        query = f"?{urlencode({'from': start})}" if start is not None else ""
        connection, response = self._connection.open(
            "GET", f"{self._path}/events{query}", timeout_s=timeout_s
        )
        try:
            yield from _read_events(response)
        except (OSError, http.client.HTTPException) as error:
            raise NotServed(f"the stream of events broke: {error}") from error
        finally:
            connection.close()

    def wait(self, timeout_s: Optional[float] = None, poll_s: float = 0.5) -> RunSummary:
        """Waits for the end of the run. Raises `TimeoutError`, or `NotServed` if its program ends
        before anybody learns how."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            summary = self.summary()
            if summary.is_over:
                return summary
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the run {summary.workflow} has not ended")
            time.sleep(poll_s)

    def hold(self, job: Optional[str] = None) -> str:
        """Starts no further job: of the run, or of the pipeline of a job."""
        return self._post(self._job_path(job) + "/hold" if job is not None else "/hold")

    def release(self, job: Optional[str] = None) -> str:
        """Ends a hold."""
        return self._post(self._job_path(job) + "/release" if job is not None else "/release")

    def cancel(self, job: Optional[str] = None) -> str:
        """Gives up the run, or the rest of the pipeline of a job."""
        return self._post(self._job_path(job) + "/cancel" if job is not None else "/cancel")

    def prefer(self, job: str, priority: int = 1) -> str:
        """Sets the priority of the pipeline of a job."""
        return self._post(self._job_path(job) + "/priority", {"priority": priority})


def _read_events(response: http.client.HTTPResponse) -> Iterator[RunEvent]:
    event, data = "", ""
    for line in response:
        text = line.decode().rstrip("\r\n")
        if text.startswith("event: "):
            event = text[len("event: ") :]
        elif text.startswith("data: "):
            data = text[len("data: ") :]
        elif not text and data:
            value = json.loads(data)
            if event == "line":
                yield _read(HistoryLine, value)
            else:
                yield RunSummary.from_json(value)
            event, data = "", ""


class Client:
    """An API by its address and a token. Calls wait; threads may share a client."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 30.0) -> None:
        self._connection = _Connection(url, token, timeout_s)

    @property
    def url(self) -> str:
        """Where the API is."""
        return self._connection.url

    def session(self) -> Mapping[str, Any]:
        """Who asks, and which version answers."""
        session: Mapping[str, Any] = self._connection.call("GET", "/session")
        return session

    def runs(self) -> list[RunSummary]:
        """The runs that this API shows."""
        runs = self._connection.call("GET", "/runs")["runs"]
        return [RunSummary.from_json(run) for run in runs]

    def run(self, run: str = CURRENT_RUN) -> RunHandle:
        """A run by its id; by default the one that the program serves first."""
        return RunHandle(self._connection, run)

    def login_link(self) -> str:
        """A link that opens the page in a browser, once."""
        link: str = self._connection.call("POST", "/login-links")["url"]
        return link

    def metrics(self) -> Mapping[str, Any]:
        """Figures by name: counters and gauges."""
        metrics: Mapping[str, Any] = self._connection.call("GET", "/metrics")
        return metrics

    # The queue of a service

    def submit(
        self, workflow: PathLike, *, priority: int = 0, files: Sequence[PathLike] = ()
    ) -> int:
        """Adds a workflow file to the queue of a service, and returns its number.

        `files` are the lists, tables and other files that the workflow names, below its directory.
        """
        path = Path(workflow)
        beside = {}
        for file in files:
            name = (path.parent / file).resolve().relative_to(path.parent.resolve()).as_posix()
            beside[name] = (path.parent / file).read_text()
        body = {
            "name": path.name,
            "text": path.read_text(),
            "files": beside,
            "priority": priority,
            # A request that is repeated adds no second workflow.
            "key": secrets.token_hex(16),
        }
        number: int = self._connection.call("POST", "/workflows", body)["id"]
        return number

    def workflow(self, number: int) -> WorkflowEntry:
        """A workflow of the queue. Raises `NotServed` if this user has none of that number."""
        for entry in self.workflows():
            if entry.id == number:
                return entry
        raise NotServed(f"there is no workflow {number}")

    def wait_for_workflow(
        self, number: int, timeout_s: Optional[float] = None, poll_s: float = 0.5
    ) -> WorkflowEntry:
        """Waits until a workflow of the queue has ended. Raises `TimeoutError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            entry = self.workflow(number)
            if entry.is_over:
                return entry
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"workflow {number} is {entry.state} after {timeout_s} s")
            time.sleep(poll_s)

    def workflows(self) -> list[WorkflowEntry]:
        """The queue of a service."""
        found = self._connection.call("GET", "/workflows")["workflows"]
        return [
            _read(WorkflowEntry, {"user": None, "details": None, **workflow}) for workflow in found
        ]

    def hold_workflow(self, number: int) -> str:
        """Keeps a workflow from starting."""
        return self._command(number, "hold")

    def release_workflow(self, number: int) -> str:
        """Ends a hold."""
        return self._command(number, "release")

    def remove_workflow(self, number: int) -> str:
        """Removes a workflow; one that runs is cancelled."""
        return self._command(number, "remove")

    def _command(self, number: int, verb: str) -> str:
        message: str = self._connection.call("POST", f"/workflows/{number}/{verb}")["message"]
        return message


class AsyncRun:
    """A run for asyncio: the methods of `RunHandle`, to be awaited."""

    def __init__(self, run: RunHandle) -> None:
        self._run = run

    async def summary(self) -> RunSummary:
        """The run as it is now."""
        return await asyncio.to_thread(self._run.summary)

    async def jobs(
        self, *, state: Optional[str] = None, search: Optional[str] = None
    ) -> list[JobSummary]:
        """The jobs, or those of a state, or with a text in their names."""
        return await asyncio.to_thread(lambda: list(self._run.jobs(state=state, search=search)))

    async def job(self, name: str) -> JobInfo:
        """A job with its attempts, and why it waits."""
        return await asyncio.to_thread(self._run.job, name)

    async def logs(self, job: str, attempt: Optional[int] = None) -> JobOutput:
        """What a job printed."""
        return await asyncio.to_thread(self._run.logs, job, attempt)

    async def waiting(self) -> list[WaitGroup]:
        """Why jobs wait."""
        return await asyncio.to_thread(self._run.waiting)

    async def failures(self) -> list[Failure]:
        """What failed, why, and what to do."""
        return await asyncio.to_thread(self._run.failures)

    async def nodes(self) -> list[NodeInfo]:
        """The nodes that the run has seen."""
        return await asyncio.to_thread(self._run.nodes)

    async def volumes(self) -> list[VolumeInfo]:
        """The volumes of the run."""
        return await asyncio.to_thread(self._run.volumes)

    async def hold(self, job: Optional[str] = None) -> str:
        """Starts no further job: of the run, or of the pipeline of a job."""
        return await asyncio.to_thread(self._run.hold, job)

    async def release(self, job: Optional[str] = None) -> str:
        """Ends a hold."""
        return await asyncio.to_thread(self._run.release, job)

    async def cancel(self, job: Optional[str] = None) -> str:
        """Gives up the run, or the rest of the pipeline of a job."""
        return await asyncio.to_thread(self._run.cancel, job)

    async def prefer(self, job: str, priority: int = 1) -> str:
        """Sets the priority of the pipeline of a job."""
        return await asyncio.to_thread(self._run.prefer, job, priority)

    async def wait(self, timeout_s: Optional[float] = None) -> RunSummary:
        """Waits for the end of the run. Raises as `RunHandle.wait`."""

        async def until_over() -> RunSummary:
            while True:
                summary = await self.summary()
                if summary.is_over:
                    return summary
                await asyncio.sleep(0.5)

        return await asyncio.wait_for(until_over(), timeout_s)

    async def events(self, start: Optional[int] = None) -> AsyncIterator[RunEvent]:
        """The run as it goes on, until it is over. Raises as `RunHandle.events`."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Union[RunEvent, BafsError, None]] = asyncio.Queue()
        is_unwanted = threading.Event()

        def put(event: Union[RunEvent, BafsError, None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)

        def read() -> None:
            try:
                for event in self._run.events(start):
                    if is_unwanted.is_set():
                        return
                    put(event)
                put(None)
            except BafsError as error:
                put(error)

        threading.Thread(target=read, name="bafs-events", daemon=True).start()
        try:
            while (event := await queue.get()) is not None:
                if isinstance(event, BafsError):
                    raise event
                yield event
        finally:
            is_unwanted.set()


class AsyncClient:
    """An API for asyncio: each call runs in a thread."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 30.0) -> None:
        self._client = Client(url, token, timeout_s=timeout_s)

    @property
    def url(self) -> str:
        """Where the API is."""
        return self._client.url

    async def runs(self) -> list[RunSummary]:
        """The runs that this API shows."""
        return await asyncio.to_thread(self._client.runs)

    def run(self, run: str = CURRENT_RUN) -> AsyncRun:
        """A run by its id; by default the one that the program serves first."""
        return AsyncRun(self._client.run(run))

    async def submit(
        self, workflow: PathLike, *, priority: int = 0, files: Sequence[PathLike] = ()
    ) -> int:
        """Adds a workflow file to the queue of a service, and returns its number."""
        return await asyncio.to_thread(
            lambda: self._client.submit(workflow, priority=priority, files=files)
        )

    async def wait_for_workflow(
        self, number: int, timeout_s: Optional[float] = None
    ) -> WorkflowEntry:
        """Waits until a workflow of the queue has ended. Raises `TimeoutError`."""
        return await asyncio.to_thread(self._client.wait_for_workflow, number, timeout_s)

    async def hold_workflow(self, number: int) -> str:
        """Keeps a workflow from starting."""
        return await asyncio.to_thread(self._client.hold_workflow, number)

    async def release_workflow(self, number: int) -> str:
        """Ends a hold."""
        return await asyncio.to_thread(self._client.release_workflow, number)

    async def remove_workflow(self, number: int) -> str:
        """Removes a workflow; one that runs is cancelled."""
        return await asyncio.to_thread(self._client.remove_workflow, number)

    async def workflows(self) -> list[WorkflowEntry]:
        """The queue of a service."""
        return await asyncio.to_thread(self._client.workflows)

    async def login_link(self) -> str:
        """A link that opens the page in a browser, once."""
        return await asyncio.to_thread(self._client.login_link)


def connect(run: Optional[PathLike] = None, *, timeout_s: float = 30.0) -> Client:
    """The API of a run of this user on this machine, by its workflow or journal, or of a service
    that this user operates, by its state.

    Without `run`: the API that BAFS_API_URL and BAFS_API_TOKEN name, else that of the only run or
    service that is served. Waits up to `timeout_s` for a run that begins. Raises `NotServed`.
    """
    return Client(*_find_api(run, timeout_s))


def connect_async(run: Optional[PathLike] = None, *, timeout_s: float = 30.0) -> AsyncClient:
    """As `connect`, for asyncio."""
    return AsyncClient(*_find_api(run, timeout_s))


def connect_service(
    identity: Optional[PathLike] = None,
    service: Optional[str] = None,
    *,
    timeout_s: float = 30.0,
) -> Client:
    """The API of a service, with the identity that `bafs user add` created.

    `identity` is its directory, else BAFS_IDENTITY names it. `service` is the address of another
    service, as `HOST:PORT`. Runs the program `bafs`, and raises its errors. The service needs a
    page (`bafs scheduler --page`), which its own machine alone reaches; from another one, forward
    the port with `ssh -L`.
    """
    return Client(*_open_service(identity, service, timeout_s), timeout_s=timeout_s)


def connect_service_async(
    identity: Optional[PathLike] = None,
    service: Optional[str] = None,
    *,
    timeout_s: float = 30.0,
) -> AsyncClient:
    """As `connect_service`, for asyncio."""
    return AsyncClient(*_open_service(identity, service, timeout_s), timeout_s=timeout_s)


def _open_service(
    identity: Optional[PathLike], service: Optional[str], timeout_s: float
) -> tuple[str, str]:
    words = ["queue", "--page"]
    if identity is not None:
        words += ["--identity", os.fspath(identity)]
    if service is not None:
        words += ["--service", service]
    opened = call_json(words, timeout_s=timeout_s)
    return opened["url"], opened["token"]


def _find_api(run: Optional[PathLike], timeout_s: float) -> tuple[str, str]:
    url, token = os.environ.get(URL_VARIABLE), os.environ.get(TOKEN_VARIABLE)
    if run is None and url and token:
        return url, token
    wanted = None if run is None else _journal_names(run)
    deadline = time.monotonic() + timeout_s
    while True:
        found = [
            (page["url"], page["token"])
            for page in _served_pages()
            if wanted is None or page.get("journal", page.get("state")) in wanted
        ]
        if len(found) == 1 or (found and wanted is not None):
            return found[-1]
        if len(found) > 1:
            raise NotServed(f"{len(found)} pages are served; name a run by its workflow, or a state")
        if time.monotonic() >= deadline:
            what = "no run" if run is None else f"no run of {os.fspath(run)}"
            raise NotServed(f"{what} is served: use `bafs run --page`, or `bafs page`")
        time.sleep(0.1)


def _journal_names(run: PathLike) -> frozenset[str]:
    path = os.path.abspath(os.fspath(run))
    return frozenset({path, f"{path}.journal"})


def _served_pages() -> list[Mapping[str, Any]]:
    """What programs of this user serve, in the order of their start."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    directory = (
        Path(named) / "bafs" if named else Path(tempfile.gettempdir()) / f"bafs-{os.getuid()}"
    )
    pages = []
    for path in directory.glob("page-*.json"):
        try:
            status = path.stat()
            page = json.loads(path.read_text())
            os.kill(page["pid"], 0)
        except (OSError, ValueError, KeyError):
            # It ended just now, or without tidying up.
            continue
        if status.st_uid == os.getuid():
            pages.append((status.st_mtime, page))
    return [page for _, page in sorted(pages, key=lambda pair: pair[0])]
