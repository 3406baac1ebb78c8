"""The tutorial for notebooks runs as it is written, and hands in to a service."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from .service import TestService

TUTORIAL = Path(__file__).parents[3] / "docs/tutorial/notebook.md"


def test_tutorial_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    examples = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
    assert len(examples) == 5
    names: dict[str, Any] = {}
    for example in examples[:4]:
        exec(example, names)
    assert (names["state"], names["code"]) == ("complete", 0)
    assert (tmp_path / "results/counts.txt").read_text() == "3\n3\n3\n"
    printed = capsys.readouterr().out
    assert "/login?code=" in printed and "complete: 4 of 4 jobs" in printed
    assert "job gather on node" in printed
    # The service of an operator, elsewhere.
    with TestService(tmp_path / "operator") as service:
        service.add_user("alice", tmp_path / "alice")
        shutil.copytree(tmp_path / "texts", service.export / "alice/texts")
        exec(examples[4], names)
        assert names["entry"].state == "complete"
        assert (service.export / "alice/results/counts.txt").read_text() == "3\n3\n3\n"
    assert "is complete: 4 jobs" in capsys.readouterr().out
