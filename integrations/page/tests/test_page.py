"""The page in a real browser, with real runs."""

from __future__ import annotations

import http.server
import os
import threading
import time
from pathlib import Path
from typing import Iterator

import pytest
from bafs import Job, Workflow
from playwright.sync_api import Browser, Page, expect

from .conftest import Served, open_page, start_run, wait_until


@pytest.fixture(scope="module")
def page(browser: Browser, served: Served) -> Iterator[Page]:
    it = open_page(browser, served.link(), viewport={"width": 1280, "height": 800})
    yield it
    assert not it.complaints  # type: ignore[attr-defined]
    it.context.close()


def take_screenshot(page: Page, name: str) -> None:
    """Makes a picture for the documents, if they are wanted."""
    if directory := os.environ.get("BAFS_SCREENSHOTS"):
        page.screenshot(path=Path(directory) / f"{name}.png")


def show(page: Page, view: str) -> None:
    page.get_by_role("tab", name=view).click()
    page.wait_for_selector("body[data-drawn]")


def test_page_needs_the_login_link(browser: Browser, served: Served, page: Page) -> None:
    other = browser.new_context().new_page()
    other.goto(served.link())
    expect(other.get_by_role("heading", name="Log in first")).to_be_visible()
    other.goto(served.link().split("/login")[0])
    expect(other.get_by_role("heading", name="Log in first")).to_be_visible()
    other.context.close()


def test_page_shows_progress_and_state(page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("words")
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#counts")).to_contain_text("8 of 11 jobs done")
    expect(page.locator("#counts")).to_contain_text("4 of 4 results at home")
    expect(page.locator("#bar")).to_have_attribute("aria-label", "Jobs by state: 8 done, 1 running, 1 failed, 1 waiting")


def test_failure_is_shown_with_advice(page: Page) -> None:
    group = page.locator("#failures .group")
    expect(group).to_contain_text("1 job")
    expect(group.locator(".advice")).to_contain_text("Read its output below")
    expect(group).to_contain_text("no such file: input.fa")
    expect(group.get_by_role("button", name="bad")).to_be_visible()
    take_screenshot(page, "page-overview")


def test_waiting_reasons_are_grouped(page: Page) -> None:
    group = page.locator("#waiting .group")
    expect(group).to_contain_text("1 job: other jobs must finish first")
    group.get_by_role("button", name="late").click()
    expect(page.locator("#job-reason")).to_contain_text("waits for 'slow' to finish")
    page.keyboard.press("Escape")
    expect(page.locator("#job-dialog")).to_be_hidden()


def test_output_of_a_running_job_is_live(page: Page) -> None:
    show(page, "Jobs")
    page.get_by_label("Name contains").fill("slow")
    page.locator("#job-table").get_by_role("button", name="slow").click()
    log = page.locator("#log-stdout")
    expect(log).to_contain_text("tick 1\n", use_inner_text=False)
    before = len(log.text_content() or "")
    wait_until(lambda: len(log.text_content() or "") > before, "more output")
    expect(page.locator("#log-live")).to_contain_text("live, on n")
    take_screenshot(page, "page-job")
    page.get_by_role("button", name="Close").click()


def test_output_never_becomes_markup(page: Page) -> None:
    page.get_by_label("Name contains").fill("make1")
    page.locator("#job-table").get_by_role("button", name="make1").click()
    expect(page.locator("#log-stdout")).to_contain_text("<img src=x")
    assert page.locator("dialog img, dialog script").count() == 0
    assert "hacked" not in page.title()
    page.get_by_role("button", name="Close").click()
    page.get_by_label("Name contains").fill("")


def test_every_view_draws(page: Page) -> None:
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v !== 0)"
    show(page, "Graph")
    assert page.locator("#graph-canvas").evaluate(drawn)
    take_screenshot(page, "page-graph")
    show(page, "Timeline")
    assert page.locator("#gantt-canvas").evaluate(drawn)
    for chart in ("slots", "space", "home", "link"):
        assert page.locator(f"#chart-{chart} canvas").evaluate(drawn), chart
    take_screenshot(page, "page-timeline")
    show(page, "Nodes and volumes")
    expect(page.locator("#node-table tbody tr")).to_have_count(2)
    expect(page.locator("#volume-table tbody")).to_contain_text("work1")
    show(page, "Events")
    expect(page.locator("#event-list")).to_contain_text("job bad")
    show(page, "Overview")


def test_keyboard_reaches_all_views(page: Page) -> None:
    page.locator("#tab-overview").focus()
    for view in ("jobs", "graph", "timeline", "cluster", "events", "overview"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{view}")).to_be_focused()
        expect(page.locator(f"#{view}")).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.locator("#state-filter").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#job-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#tab-jobs").focus()
    page.keyboard.press("Home")
    expect(page.locator("#overview")).to_be_visible()


def test_hold_and_release_reach_the_run(page: Page, served: Served) -> None:
    run = served.client().run()
    page.locator("#hold").click()
    expect(page.locator("#state")).to_have_text("held: no job starts")
    assert run.summary().state == "held"
    page.locator("#hold").click()
    expect(page.locator("#state")).to_have_text("running")
    wait_until(lambda: run.summary().state == "running", "a release")


def test_preference_changes_the_priority(page: Page, served: Served) -> None:
    show(page, "Jobs")
    page.get_by_label("Name contains").fill("late")
    page.locator("#job-table").get_by_role("button", name="late").click()
    page.locator("#job-prefer").click()
    expect(page.locator("#job-facts")).to_contain_text("priority 1")
    assert served.client().run().job("late").priority == 1
    page.locator("#job-hold").click()
    expect(page.locator("#job-hold")).to_have_text("Release")
    assert served.client().run().job("late").is_held
    page.locator("#job-hold").click()
    expect(page.locator("#job-hold")).to_have_text("Hold")
    page.get_by_role("button", name="Close").click()


def test_another_page_cannot_forge_requests(page: Page, served: Served) -> None:
    """A page of another server on this machine, in the browser that has the session."""
    client = served.client()
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        other = page.context.new_page()
        other.goto(f"http://127.0.0.1:{server.server_port}/")
        for path in ("/api/v1/runs/current/hold", "/api/v1/runs/current/cancel"):
            script = f"fetch('{client.url}{path}', {{method: 'POST', credentials: 'include', mode: 'no-cors'}})"
            other.evaluate(f"{script}.catch(() => null)")
        read = f"fetch('{client.url}/api/v1/runs', {{credentials: 'include'}}).then(r => r.text()).catch(() => null)"
        assert other.evaluate(read) is None
        other.close()
        server.shutdown()
    time.sleep(3)
    assert client.run().summary().state == "running"


def test_page_fits_a_phone_in_the_dark(browser: Browser, served: Served) -> None:
    phone = open_page(
        browser,
        served.client().login_link(),
        viewport={"width": 390, "height": 844},
        color_scheme="dark",
        has_touch=True,
        is_mobile=True,
    )
    for view in ("Overview", "Jobs", "Graph", "Timeline", "Nodes and volumes", "Events"):
        show(phone, view)
        width = phone.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{view} is {width} wide"
    show(phone, "Overview")
    ground = phone.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(20, 24, 29)"
    take_screenshot(phone, "page-phone")
    small = phone.evaluate(
        "[...document.querySelectorAll('button:not(.link)')].filter(b => b.offsetParent"
        " && b.offsetHeight < 36).map(b => b.id)"
    )
    assert small == [], "too small for a finger"
    assert not phone.complaints  # type: ignore[attr-defined]
    phone.context.close()


def test_end_of_the_run_stays_on_the_page(page: Page, served: Served) -> None:
    show(page, "Jobs")
    page.get_by_label("Name contains").fill("slow")
    page.locator("#job-table").get_by_role("button", name="slow").click()
    page.locator("#job-cancel").click()
    page.get_by_role("button", name="Cancel pipeline").click()
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#state")).to_have_text("failed")
    assert served.process.wait(60) == 1
    expect(page.locator("#counts")).to_contain_text("8 of 11 jobs done")
    expect(page.locator("#hold")).to_be_hidden()


def test_page_shows_ten_thousand_jobs(browser: Browser, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        workflow = Workflow()
        for number in range(5000):
            workflow.add(Job(f"map{number}", "sleep", ["1"]))
            workflow.add(Job(f"merge{number}", "true", after=[f"map{number}"]))
        workflow.write(path)

    served = start_run(tmp_path, "many.bafs", write)
    try:
        page = open_page(browser, served.link())
        expect(page.locator("#counts")).to_contain_text("of 10,000 jobs done")
        times = {}
        for view in ("Jobs", "Graph", "Timeline", "Overview"):
            began = time.monotonic()
            show(page, view)
            times[view] = time.monotonic() - began
        print(times)
        assert max(times.values()) < 15, times
        show(page, "Jobs")
        page.get_by_label("Name contains").fill("merge4999")
        expect(page.locator("#job-table tbody tr")).to_have_count(1)
        page.locator("#cancel").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#state")).to_have_text("cancelled")
        assert not page.complaints  # type: ignore[attr-defined]
        page.context.close()
        assert served.process.wait(60) == 1
    finally:
        served.stop()
