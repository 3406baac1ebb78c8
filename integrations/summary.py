"""Prints how the tests of a report of pytest ended, in the form of cargo's tests.

summary.py REPORT SUITE: the line `test result: …`. Variable BAFS_SKIP_LOG names the file that takes
what was skipped; BAFS_PAGE_RESULT the file that takes the figures of `cargo xtask bench service`.
"""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Iterable


def count_outcomes(cases: Iterable[tree.Element]) -> tuple[int, int]:
    """Tests that passed, and tests that failed, of those that were not skipped."""
    ran = [case for case in cases if case.find("skipped") is None]
    bad = sum(case.find("failure") is not None or case.find("error") is not None for case in ran)
    return len(ran) - bad, bad


def main() -> None:
    """Reads the report."""
    report, suite = sys.argv[1:]
    cases = list(tree.parse(report).getroot().iter("testcase"))
    skipped = [(case.get("name"), reason.get("message"))
               for case in cases if (reason := case.find("skipped")) is not None]
    if log := os.environ.get("BAFS_SKIP_LOG"):
        with open(log, "a") as file:
            file.writelines(f"SKIPPED: {suite}::{name}: {reason}\n" for name, reason in skipped)
    if result := os.environ.get("BAFS_PAGE_RESULT"):
        parts = {part: count_outcomes(case for case in cases
                                      if part in f"{case.get('classname')}.{case.get('name')}")
                 for part in ("test_page", "test_fuzzer")}
        passed, bad = parts["test_page"]
        found = parts["test_fuzzer"][1] if any(parts["test_fuzzer"]) else None
        figures = {"page_tests": passed, "page_failures": bad, "api_fuzz_failures": found}
        Path(result).write_text(json.dumps(figures))
    passed, bad = count_outcomes(cases)
    # A skipped test counts as passed until the log is read.
    print(f"test result: {'FAILED' if bad else 'ok'}. {passed + len(skipped)} passed; "
          f"{bad} failed; 0 ignored")


main()
