"""The engine core's process ends when one of its workers does, and takes the others with it."""

import json
import os
import signal
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from quire_engine import EngineConfig, SamplingParams
from quire_engine.config import FrontendConfig
from quire_engine.messages import EngineCoreRequest
from quire_engine.replicas.link import LocalLink
from support.processes import eventually, is_gone

KEEP_FIRST_LINE = """
    import io, os, sys
    names = {"quire_engine.core.core_process": "core", "quire_engine.worker.worker_process": "worker"}
    for name in names.keys() & set(sys.orig_argv):
        line = sys.stdin.buffer.readline()
        with open(f"{os.environ['KEEP_LINES_IN']}/{names[name]}-{os.getpid()}", "wb") as file:
            file.write(line)
        sys.stdin = io.TextIOWrapper(io.BytesIO(line))
"""


def start(folder: Path, **more: object) -> LocalLink:
    settings = {"model": str(folder), "max_model_len": 256, "tensor_parallel_size": 2, "kv_cache_memory_bytes": 2**20}
    client = LocalLink(EngineConfig.from_settings({**settings, **more}))
    client.wait_until_ready()
    return client


# Which rank it is matters only to those that wait for it.
@pytest.mark.parametrize(("rank", "busy"), [(1, False), (0, True), (1, True)], ids=["1-idle", "0-busy", "1-busy"])
def test_worker_that_is_killed_ends_the_engine(rank: int, busy: bool, checkpoint: Callable[[str], Path]) -> None:
    client = start(checkpoint("tied-gqa"))
    try:
        pids = client.ready.worker_pids
        assert len(pids) == 2
        if busy:
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            client.add_request(EngineCoreRequest("a", [1, 2, 3], params))
        os.kill(pids[rank], signal.SIGKILL)
        assert eventually(lambda: client._process.poll() is not None)
        assert client._process.returncode == 1
        assert eventually(lambda: all(is_gone(pid) for pid in pids))
    finally:
        client.shutdown()


def test_workers_die_with_the_engine_core(checkpoint: Callable[[str], Path]) -> None:
    client = start(checkpoint("tied-gqa"))
    try:
        pids = client.ready.worker_pids
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(client.pid, signal.SIGKILL)
        assert eventually(lambda: all(is_gone(pid) for pid in pids))
    finally:
        client.shutdown()


def test_shutdown_ends_all_processes(checkpoint: Callable[[str], Path]) -> None:
    client = start(checkpoint("tied-gqa"))
    pids = [client.pid, *client.ready.worker_pids]
    client.shutdown()
    assert all(is_gone(pid) for pid in pids)
    assert client._process.returncode == 0


def test_neither_the_engine_core_nor_a_rank_is_told_the_frontends_settings(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "only-the-frontend-knows"
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(KEEP_FIRST_LINE), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KEEP_LINES_IN", str(tmp_path))
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # not forked: Python reads sitecustomize when it starts
    client = start(checkpoint("tied-gqa"), introspection_token=token, max_num_seqs=7)
    try:
        pids = client.ready.worker_pids
        names = {f"core-{client.pid}", *(f"worker-{pid}" for pid in pids)}
    finally:
        client.shutdown()
    for name in names:
        line = (tmp_path / name).read_text(encoding="utf-8")
        assert json.loads(line)["config"]["scheduler"]["max_num_seqs"] == 7
        assert token not in line
        assert [field.name for field in fields(FrontendConfig) if f'"{field.name}"' in line] == []
