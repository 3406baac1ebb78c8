"""The API of a service: found by its operator and by its users, who see their own only."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator

import bafs.api
import pytest

from .service import TestService

HELLO = """volume out scratch 1 MB
job hello {
executable = /bin/sh
arguments = -c "echo hello > /out/text"
}
mount out hello /out
extract out text bafs://home/alice/text
"""

LISTED = """for s in lines("names.txt")
job say_$(s) {
executable = /bin/true
}
end
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestService]:
    """A service with two users."""
    directory = tmp_path_factory.mktemp("service")
    patch = pytest.MonkeyPatch()
    runtime = directory / "runtime"
    runtime.mkdir(mode=0o700)
    patch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with TestService(directory / "operator") as it:
        for name in ("alice", "bob"):
            it.add_user(name, directory / name)
        yield it
    patch.undo()


def identity(service: TestService, name: str) -> Path:
    return service.directory.parent / name


def test_operator_is_found_by_the_state(service: TestService) -> None:
    client = bafs.api.connect(service.state, timeout_s=10)
    assert client.session()["has_queue"]
    assert bafs.api.connect(timeout_s=10).url == client.url, "it is the only one"


def test_users_hand_in_and_see_their_own(service: TestService, tmp_path: Path) -> None:
    alice = bafs.api.connect_service(identity(service, "alice"))
    bob = bafs.api.connect_service(identity(service, "bob"))
    path = tmp_path / "hello.bafs"
    path.write_text(HELLO)
    number = alice.submit(path)
    assert alice.wait_for_workflow(number, timeout_s=120).state == "complete"
    assert (service.export / "alice/text").read_text() == "hello\n"
    assert alice.run(str(number)).summary().state == "complete"
    assert bob.workflows() == []
    with pytest.raises(bafs.api.ApiError) as hidden:
        bob.run(str(number)).summary()
    assert hidden.value.status == 404
    with pytest.raises(bafs.api.ApiError) as foreign:
        bob.submit(path)
    assert foreign.value.error_class == "Denied"
    operator = bafs.api.connect(service.state, timeout_s=10)
    assert [entry.user for entry in operator.workflows()] == ["alice"]


def test_files_travel_with_the_workflow(service: TestService, tmp_path: Path) -> None:
    alice = bafs.api.connect_service(identity(service, "alice"))
    path = tmp_path / "listed.bafs"
    path.write_text(LISTED)
    (tmp_path / "names.txt").write_text("a\nb\n")
    number = alice.submit(path, files=["names.txt"])
    assert alice.wait_for_workflow(number, timeout_s=120).state == "complete"
    jobs = {job.name for job in alice.run(str(number)).jobs()}
    assert jobs == {"say_a", "say_b"}


def test_asynchronous_client_hands_in(service: TestService, tmp_path: Path) -> None:
    path = tmp_path / "again.bafs"
    path.write_text(HELLO.replace("alice/text", "alice/again"))
    client = bafs.api.connect_service_async(identity(service, "alice"))

    async def hand_in() -> str:
        number = await client.submit(path)
        entry = await client.wait_for_workflow(number, timeout_s=120)
        return entry.state

    with ThreadPoolExecutor() as threads:
        assert threads.submit(asyncio.run, hand_in()).result() == "complete"
    assert (service.export / "alice/again").read_text() == "hello\n"


def test_removed_users_lose_their_token(service: TestService, tmp_path: Path) -> None:
    service.add_user("carol", tmp_path / "carol")
    carol = bafs.api.connect_service(tmp_path / "carol")
    assert carol.workflows() == []
    service.call("user", "remove", "carol")
    with pytest.raises(bafs.api.ApiError) as removed:
        carol.workflows()
    assert removed.value.status == 401
    with pytest.raises(bafs.BafsError):
        bafs.api.connect_service(tmp_path / "carol")
