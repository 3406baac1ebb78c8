"""The tutorial for notebooks runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

TUTORIAL = Path(__file__).parents[3] / "docs/tutorial/notebook.md"


def test_tutorial_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    examples = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    assert (names["state"], names["code"]) == ("complete", 0)
    assert (tmp_path / "results/counts.txt").read_text() == "3\n3\n3\n"
    printed = capsys.readouterr().out
    assert "/login?code=" in printed and "complete: 4 of 4 jobs" in printed
    assert "job gather on node" in printed
