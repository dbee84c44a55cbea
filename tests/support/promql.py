"""Debian's Prometheus tools for tests, and the names that a PromQL expression uses."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import ROOT

__all__ = ["find_tool", "run_tool", "selectors"]

UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin"
"""Where `make .venv/.prometheus-installed` leaves them."""

_STRING = r'"(?:[^"\\]|\\.)*"'
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{{(?:[^{{}}\"]|{_STRING})*\}})?(\s*\()?")
_MATCHER = re.compile(rf"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*({_STRING})")
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


def find_tool(name: str) -> Path:
    """`promtool`, `prometheus` or `amtool`: from PATH, or unpacked into .venv; a test that needs one fails without."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}{os.pathsep}{UNPACKED}")
    if found is None:
        pytest.fail(f"{name} is neither on PATH nor in {UNPACKED}; run: make .venv/.prometheus-installed")
    return Path(found)


def run_tool(name: str, *arguments: str, cwd: Path) -> str:
    """Run one to its end, and return what it said; a failure fails the test."""
    done = subprocess.run(
        [find_tool(name), *arguments], cwd=cwd, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every metric in an expression, with what its labels are compared to."""
    expression = re.sub(r"#.*|\[[^\]]*\]", "", _GROUPING.sub(" ", expression))
    for match in _SELECTOR.finditer(expression):
        name, labels, call = match.groups()
        if call is None and name.lower() not in _WORDS and not _is_in_number(expression, match.start()):
            yield name, {label: value[1:-1] for label, value in _MATCHER.findall(labels or "")}


def _is_in_number(expression: str, start: int) -> bool:
    """Whether a word is the end of a number, such as the e in 1e3."""
    return start > 0 and expression[start - 1].isalnum()
