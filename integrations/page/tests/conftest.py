"""Runs of local clusters that serve their page, and a browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import bafs.api
import pytest
from bafs import Job, Mount, Workflow
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

#: Machines that run tests are busy.
TIMEOUT_S = 120.0

expect.set_options(timeout=60_000)

LINK = re.compile(r"http://[0-9.]+:\d+/login\?code=[0-9a-f]{64}")

#: Prints a line each fifth of a second, for a while.
TICKS = "i=0; while [ $i -lt 1500 ]; do i=$((i+1)); echo tick $i; sleep 0.2; done"

#: A failure as users have it.
BAD = "echo 'reading input'; echo 'no such file: input.fa' >&2; exit 3"

#: What a hostile program prints.
MARKUP = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


def wait_until(is_so: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Waits for a condition and returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := is_so():
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class Served:
    """A program that serves a page, with a client of its API."""

    def __init__(self, arguments: list[str], directory: Path, run: Path) -> None:
        self.directory, self.run_file = directory, run
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory / "runtime")}
        self.environment["USER"] = "ann"
        (directory / "runtime").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [os.environ["BAFS_BIN"], *arguments],
            cwd=directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def printed(self) -> str:
        """What the program printed so far."""
        return "".join(self.lines)

    def link(self) -> str:
        """The login link that the program printed."""

        def find() -> Optional[str]:
            found = LINK.search(self.printed)
            assert found or self.process.poll() is None, self.printed
            return found.group() if found else None

        link: str = wait_until(find, f"a login link in {self.printed}")
        return link

    def client(self, monkeypatch: Any = None) -> bafs.api.Client:
        """A client, found as a notebook finds it."""
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = self.environment["XDG_RUNTIME_DIR"]
        try:
            return bafs.api.connect(self.run_file, timeout_s=TIMEOUT_S)
        finally:
            if before is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = before

    def stop(self) -> int:
        """Ends the program as Ctrl-C does, and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(10)
        return code


def make_workflow(path: Path, with_slow: bool = True) -> Path:
    """Pipelines that succeed, fail, wait and take long."""
    workflow = Workflow()
    for number in range(1, 5):
        work = workflow.scratch(f"work{number}", "5 MB")
        mounts = [Mount(work, "/data")]
        text = f"echo '{MARKUP}'; echo {number} > /data/count"
        workflow.add(Job(f"make{number}", "sh", ["-c", text], mounts=mounts))
        check = Job(f"check{number}", "sh", ["-c", "cat /data/count"], mounts=mounts)
        workflow.add(Job(check.name, "sh", check.arguments, mounts=mounts, after=[f"make{number}"]))
        workflow.extract(work, "count", f"bafs://home/results/count{number}")
    workflow.add(Job("bad", "sh", ["-c", BAD]))
    if with_slow:
        workflow.add(Job("slow", "sh", ["-c", TICKS]))
        workflow.add(Job("late", "sh", ["-c", "true"], after=["slow"]))
    workflow.write(path)
    return path


def start_run(directory: Path, name: str, workflow: Callable[[Path], Any]) -> Served:
    """Starts a run with a page on two nodes."""
    path = directory / name
    workflow(path)
    options = ["--local", "2", "--page", "--journal", f"{path}.journal"]
    return Served(["run", str(path), *options], directory, path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run that goes on until a test cancels its slow pipeline."""
    started = start_run(tmp_path_factory.mktemp("live"), "words.bafs", make_workflow)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`bafs page` over a run that has ended."""
    directory = tmp_path_factory.mktemp("ended")
    path = make_workflow(directory / "ended.bafs", with_slow=False)
    done = subprocess.run(
        [os.environ["BAFS_BIN"], "run", str(path), "--local", "2", "--journal", f"{path}.journal"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1, done.stderr
    started = Served(["page", str(path)], directory, path)
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as it:
        yield it


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """Debian's Chromium."""
    program = os.environ.get("BAFS_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("Debian's package chromium is missing")
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    it = playwright.chromium.launch(executable_path=program, args=arguments)
    yield it
    it.close()


def open_page(browser: Browser, link: str, **options: Any) -> Page:
    """A page that is logged in. Its complaints fail the test that looks for them."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(TIMEOUT_S * 1000)
    complaints: list[str] = []
    # The program that serves a page ends with its run.
    is_wrong = lambda it: it.type == "error" and "ERR_CONNECTION" not in it.text
    page.on("console", lambda it: complaints.append(f"{it.text} {it.location}") if is_wrong(it) else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.complaints = complaints  # type: ignore[attr-defined]
    page.goto(link)
    page.wait_for_selector("body[data-drawn]")
    return page
