"""How long work is shown: a bar on a terminal, plain lines elsewhere."""

import pytest
from quire_cli import console
from quire_cli.console import Console, waiting_line


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_than_on_a_terminal_it_is_a_plain_line_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting_line(Console(), "loading m") as waiting:
        for seconds, percent in ((1, None), (10, None), (15, 40), (21, 45), (22, 50)):
            clock[0] = 100.0 + seconds
            waiting.tick(percent)
    assert capsys.readouterr().err.splitlines() == [
        "quire: loading m", "quire: loading m (10 s)", "quire: loading m (45%, 21 s)",
    ]  # fmt: skip


def test_a_short_wait_need_not_be_announced(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with waiting_line(Console(), "loading m", announce=False) as waiting:
        waiting.tick(50)
        clock[0] = 110.0
        waiting.tick(99)
    assert capsys.readouterr().err == "quire: loading m (99%, 10 s)\n"


def test_no_line_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A server's log, or what it says went wrong, is what its clients, stores and other hosts say, too."""
    terminal = Console()
    terminal.is_terminal = True
    terminal.line("it says \x1b]0;owned\x07\x1b[2J\x9b31m\rquire\ttab\nquire: ready")
    said = r"it says \x1b]0;owned\x07\x1b[2J\x9b31m\rquire" + "\ttab" + r"\nquire: ready"
    assert capsys.readouterr().err == said + "\n"
    terminal.status("\x1b[31mred")
    assert capsys.readouterr().err == "\r\x1b[K" + r"\x1b[31mred"


@pytest.mark.parametrize(
    ("percent", "shown"),
    [(None, "loading m (2 s)"), (0, f"loading m {'░' * 20} 0% (2 s)"), (49, f"loading m {'█' * 9}{'░' * 11} 49% (2 s)"),
     (100, f"loading m {'█' * 20} 100% (2 s)")],
)  # fmt: skip
def test_on_a_terminal_it_is_a_bar_that_is_removed_at_the_end(
    percent: int | None, shown: str, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Console()
    terminal.is_terminal = True
    with waiting_line(terminal, "loading m") as waiting:
        clock[0] = 102.0
        waiting.tick(percent)
        assert capsys.readouterr().err.endswith(shown)
    assert capsys.readouterr().err == "\r\x1b[K"
