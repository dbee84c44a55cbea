"""Lines of logs: text from outside neither controls a terminal nor looks like an entry."""

import logging
import re
import sys

import pytest
from quire_engine.system.log_lines import LineFormatter, printable
from support.source import ROOTS

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rquire\u202e\u2028\x00\ud800"
FORMAT = "quire engine[7] %(levelname)s: %(message)s"


def test_what_is_invisible_is_escaped_and_words_stay() -> None:
    assert printable(HOSTILE) == (
        r"\x1b]0;owned\x07\x1b[2J\x9b31m\rquire\u202e\u2028\x00\ud800"
    )  # fmt: skip
    for text in ("", "plain", "grüße, 日本語 🙂", "a\tb", "\\x1b"):
        assert printable(text) == text


@pytest.mark.parametrize("is_error", [False, True])
def test_an_entry_is_one_whatever_it_quotes(is_error: bool) -> None:
    forged = f"it fails: {HOSTILE}\nquire engine[7] INFO: all is well"
    caught = None
    if is_error:
        try:
            raise ValueError(forged)
        except ValueError:
            caught = sys.exc_info()
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, "of a store: %s", (forged,), caught)
    lines = LineFormatter(FORMAT).format(record).split("\n")
    assert lines[0].startswith("quire engine[7] WARNING: of a store: it fails: \\x1b]0;owned")
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])
    assert len(lines) == 2 or is_error
    assert any("Traceback" in line for line in lines) is is_error


def test_every_process_logs_so() -> None:
    """Nothing else in the product sets up a handler that writes."""
    setting_up = re.compile(r"basicConfig\(|StreamHandler\(|FileHandler\(")
    found = {
        str(path.relative_to(root))
        for package, root in ROOTS.items()
        for path in (root / package).rglob("*.py")
        if setting_up.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"quire_engine/system/log_lines.py"}
