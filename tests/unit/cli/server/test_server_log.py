"""Which lines of the server's log reach the operator, and the cause that is read from it."""

import io
from collections.abc import Sequence

import pytest
from quire_cli.console import Console
from quire_cli.server import server_log
from quire_cli.server.server_log import ServerLog, failure_cause

STAMP = "1120 20:57:07.191031 6896"
CHATTER = [
    f'I{STAMP} model_lifecycle.cc:472] "loading: echo:1"',
    f"I{STAMP} server.cc:604] ",
    "+------------------+------+",
    "| Repository Agent | Path |",
    "",
]
OURS = f'I{STAMP} triton_api.py:119] "model tinypy is served"'
ENGINE = "quire engine[11172] INFO: KV cache: 4096 blocks"
RANK = "quire worker[rank 1, 11180] WARNING: slow"
WARNING = f'W{STAMP} model_lifecycle.cc:111] "ignored"'
ERROR = f'E{STAMP} server.cc:1] "bad"'
PRINTED = "Traceback (most recent call last):"


def passed_on(lines: Sequence[str], capsys: pytest.CaptureFixture[str], *, ready: bool, everything: bool) -> list[str]:
    log = ServerLog(io.BytesIO("\n".join(lines).encode()), Console(), everything=everything)
    log.finish()
    if ready:
        log.release()
    return capsys.readouterr().err.splitlines()


def test_chatter_and_tables_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [*CHATTER, OURS, WARNING, *CHATTER]
    assert passed_on(lines, capsys, ready=True, everything=False) == [OURS, WARNING]


def test_errors_wait_until_the_server_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [ERROR, PRINTED, ENGINE, RANK, WARNING]
    assert passed_on(lines, capsys, ready=False, everything=False) == [ENGINE, RANK, WARNING]
    assert passed_on(lines, capsys, ready=True, everything=False) == [ENGINE, RANK, WARNING, ERROR, PRINTED]


def test_the_share_that_is_loaded_is_for_the_waiting_line(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (f"quire engine[{pid}] INFO: loading weights: %d%% of 1234 MB" for pid in (7, 8))
    lines = [ENGINE, first % 10, second % 70, f"{OURS} loading weights: 3% of a request", first % 40]
    log = ServerLog(io.BytesIO("\n".join(lines).encode()), Console(), everything=False)
    log.finish()
    assert log.loading_percent() == 40
    assert capsys.readouterr().err.splitlines() == [ENGINE, lines[3]]
    assert ServerLog(io.BytesIO(ENGINE.encode()), Console(), everything=False).loading_percent() is None


def test_errors_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log = ServerLog(io.BytesIO(f"{ERROR}\n{PRINTED}\n{CHATTER[0]}\n".encode()), Console(), everything=False)
    log.finish()
    log.release_old()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(server_log, "_HOLD_S", 0.0)
    log.release_old()
    assert capsys.readouterr().err.splitlines() == [ERROR, PRINTED]
    log.release()
    assert capsys.readouterr().err == ""
    assert log.last_words == PRINTED


def test_everything_means_everything(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [*CHATTER, ERROR, "Usage: tritonserver [options]", "  --help"]
    assert passed_on(lines, capsys, ready=False, everything=True) == lines


def test_usage_text_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["Usage: tritonserver [options]", "  --help", "\tPrint usage"]
    assert passed_on(lines, capsys, ready=True, everything=False) == []


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            f"E{STAMP} model_lifecycle.cc:642] \"failed to load 'echo' version 1: Internal: TritonModelException: "
            '/x has no config.json; copy it\\n\\nAt:\\n  /x/model.py(16): initialize\\n"',
            "model 'echo' did not load: /x has no config.json; copy it",
        ),
        (
            f"E{STAMP} model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: ValueError: no \\\"b\\\"\"",
            "model 'a' did not load: ValueError: no \"b\"",
        ),
        (
            f"E{STAMP} main.cc:257] \"failed to start HTTP service: Socket '127.0.0.1:1' in use \"",
            "failed to start HTTP service: Socket '127.0.0.1:1' in use",
        ),
        ("/x/bin/tritonserver: unrecognized option '--foo'", "unrecognized option '--foo'"),
        ("error: creating server: Internal - failed to load all models",
         "creating server: Internal - failed to load all models"),
    ],
)  # fmt: skip
def test_cause_is_one_line(line: str, cause: str) -> None:
    last = "error: creating server: Internal - failed to load all models"
    assert failure_cause([OURS, line, *CHATTER, last]) == cause


def test_no_cause_in_a_healthy_log() -> None:
    assert failure_cause([*CHATTER, OURS, WARNING]) is None
