"""Fail when a test run skipped something for want of a tool; reads pytest's JUnit report."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

#: How tests/support/tools.py begins the reason of such a skip.
MARK = "missing tool:"


def missing_tools(report: Path) -> list[str]:
    """List the skipped tests whose reason is a missing tool.

    Args:
        report: File written by `pytest --junitxml`.

    Returns:
        One line per test: its name and the reason.
    """
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [
        f"{case.get('classname')}::{case.get('name')}: {skipped.get('message')}"
        for case in cases
        for skipped in case.findall("skipped")
        if MARK in (skipped.get("message") or "")
    ]


def main() -> None:
    """Exit with the list of such tests, or quietly when there is none."""
    found = missing_tools(Path(sys.argv[1]))
    if found:
        sys.exit("\n".join(["Skipped for a missing tool; install it in .ci/run:", *found]))


if __name__ == "__main__":
    main()
