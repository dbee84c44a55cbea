"""Faults that a test plants in the workers' processes."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

WORKER_PRELUDE = """
import sys
if "quire_engine.worker.worker_process" in sys.orig_argv:
    import os, threading, time, torch
    from quire_engine.messages import ModelRunnerOutput
    from quire_engine.worker import worker
    from quire_engine.worker.worker import Worker
"""


@pytest.fixture
def in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have source text executed in each worker before it starts."""

    def set_source(source: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            WORKER_PRELUDE + textwrap.indent(textwrap.dedent(source), " " * 4), encoding="utf-8"
        )
        monkeypatch.syspath_prepend(tmp_path)

    return set_source
