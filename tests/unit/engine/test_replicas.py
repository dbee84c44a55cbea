"""Engines behind one frontend, in real processes: one is killed, and its streams go on on the others, the same. Some of
them are on other hosts, which are network namespaces."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, CompletionOutput, RequestOutput
from support.engines import Stream, assert_same, engine, params, run, until
from support.namespaces import Namespace, namespaces
from support.ports import unused_port
from support.processes import is_gone
from support.remote import trusting_hosts

pytestmark = pytest.mark.slow

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.8, "seed": 3, "n": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "[a-f]{150}"}, "ignore_eos": False},
]
"""Each is sent twice, so that each engine has some of it."""
PROMPTS = [[5 + number, 6, 7] for number in range(2 * len(KINDS))]
PARAMS = [params(max_tokens=160, **kind) for kind in KINDS * 2]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> list[list[CompletionOutput]]:
    """What an engine answers that nobody disturbs."""
    undisturbed = LLM(checkpoint("tinypy"), dtype="float32")
    outputs = undisturbed.generate(PROMPTS, PARAMS, use_tqdm=False)
    undisturbed.shutdown()
    return [output.outputs for output in outputs]


def test_streams_of_an_engine_that_is_killed_go_on_on_the_other(
    checkpoint: Callable[[str], Path], expected: list[list[CompletionOutput]]
) -> None:
    tinypy = checkpoint("tinypy")

    async def main() -> list[RequestOutput]:
        first = [Stream(llm, prompt, PARAMS[3]) for prompt in PROMPTS[:2]]
        await asyncio.gather(*(stream.task for stream in first))  # one on each: their grammar compilers have started
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        await until(lambda: min(stream.num_tokens for stream in streams) > 8)
        snapshot = await llm.snapshot()
        assert {request.engine for request in snapshot.requests} == {0, 1}
        assert len(snapshot.blocks.owner) == snapshot.blocks.num_blocks
        assert [one.up for one in snapshot.engine.engines] == [True, True]
        assert len({rank.pid for rank in snapshot.engine.ranks}) == 2
        killed_at, before = time.monotonic(), [stream.num_tokens for stream in streams]
        os.kill(llm.engine_pids[1], signal.SIGKILL)
        await until(lambda: not llm.is_engine_up(1))
        assert llm.is_healthy
        assert llm.outage is None
        await until(lambda: all(s.num_tokens > was or s.task.done() for s, was in zip(streams, before, strict=True)))
        print(f"all go on {time.monotonic() - killed_at:.2f} s after the kill")
        assert not llm.is_engine_up(1), "nobody waits for the next engine"
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        await until(lambda: llm.is_engine_up(1), 60)
        await llm.sleep()
        await llm.wake_up()
        return outputs

    with engine(tinypy, step_seconds=0.005, data_parallel_size=2, kv_cache_memory_bytes=1 << 24) as (llm, recorder):
        outputs = run(llm, main)
        assert recorder.num_restarts == 1
        assert recorder.num_replayed >= 3
        pids = llm.engine_pids
    assert all(is_gone(pid) for pid in pids)
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)


def test_replicas_come_and_leave_under_load(
    checkpoint: Callable[[str], Path], expected: list[list[CompletionOutput]]
) -> None:
    """From a single engine to two and back: whoever had to move gets the same tokens, and no crash is counted."""
    tinypy = checkpoint("tinypy")

    async def main() -> list[RequestOutput]:
        before = Stream(llm, PROMPTS[0], PARAMS[0])
        await until(lambda: before.num_tokens > 2)
        await llm.scale(2)
        first = [Stream(llm, prompt, PARAMS[3]) for prompt in PROMPTS[:3]]
        await asyncio.gather(*(stream.task for stream in first))  # on both: their grammar compilers have started
        streams = [before, *(Stream(llm, *one) for one in list(zip(PROMPTS, PARAMS, strict=True))[1:])]
        await until(lambda: min(stream.num_tokens for stream in streams) > 8)
        snapshot = await llm.snapshot()
        assert {request.engine for request in snapshot.requests} == {0, 1}
        assert len(snapshot.engine.engines) == 2
        leaving = llm.engine_pids[1]
        counts = [stream.num_tokens for stream in streams]
        began_at = time.monotonic()
        scaling = asyncio.ensure_future(llm.scale(1))
        await until(lambda: all(s.num_tokens > was or s.task.done() for s, was in zip(streams, counts, strict=True)))
        print(f"all go on {time.monotonic() - began_at:.2f} s after the command")
        await scaling
        assert is_gone(leaving)
        snapshot = await llm.snapshot()
        assert {request.engine for request in snapshot.requests} <= {0}
        assert not snapshot.engine.engines
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(tinypy, step_seconds=0.005, kv_cache_memory_bytes=1 << 24) as (llm, recorder):
        outputs = run(llm, main)
        assert (recorder.num_restarts, recorder.num_replayed) == (0, 0)
        assert sum(stats.num_requests_moved for stats in recorder.iterations) >= 3
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)


def test_streams_of_engines_on_other_hosts_go_on_when_these_are_cut_off_or_killed(
    checkpoint: Callable[[str], Path], expected: list[list[CompletionOutput]], tmp_path: Path
) -> None:
    front_keys, host_keys = trusting_hosts(tmp_path)
    settings: dict[str, Any] = {
        "data_parallel_size": 3, "data_parallel_size_local": 1, "data_parallel_address": "0.0.0.0",
        "data_parallel_rpc_port": unused_port(), "data_parallel_key_file": str(front_keys),
        "kv_cache_memory_bytes": 1 << 24,
    }  # fmt: skip
    version = tmp_path / "models" / "tinypy" / "1"
    version.mkdir(parents=True)
    model = {"model": str(checkpoint("tinypy")), "dtype": "float32"}
    (version / "model.json").write_text(json.dumps({**model, **settings}))

    def headless(host: Namespace, rank: int) -> "subprocess.Popen[str]":
        options = {"model-repository": version.parents[1], "data-parallel-start-rank": rank,
                   "data-parallel-address": host.gateway, "data-parallel-key-file": host_keys}  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in options.items()]
        command = host.command(sys.executable, "-m", "quire_cli", "join", *arguments)
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    async def main() -> list[RequestOutput]:
        assert llm.is_healthy, "it waits for none of them"
        await until(lambda: llm.is_engine_up(1) and llm.is_engine_up(2), 120)
        first = [Stream(llm, prompt, PARAMS[3]) for prompt in PROMPTS[:3]]
        await asyncio.gather(*(stream.task for stream in first))
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        await until(lambda: min(stream.num_tokens for stream in streams) > 1)  # before those of fast engines end
        snapshot = await llm.snapshot()
        assert {request.engine for request in snapshot.requests} == {0, 1, 2}
        assert [bool(one.host) for one in snapshot.engine.engines] == [False, True, True]
        assert [one.answered for one in snapshot.engine.engines] == [True] * 3
        killed_at, before = time.monotonic(), [stream.num_tokens for stream in streams]
        processes[0].kill()
        hosts[1].cut()
        await until(lambda: not llm.is_engine_up(1))
        print(f"the killed one was missed after {time.monotonic() - killed_at:.2f} s")
        await until(lambda: not llm.is_engine_up(2))
        print(f"the one that was cut off was missed after {time.monotonic() - killed_at:.2f} s")
        await until(lambda: all(s.num_tokens > was or s.task.done() for s, was in zip(streams, before, strict=True)))
        hosts[1].mend()
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        await until(lambda: llm.is_engine_up(2), 60)
        again = await Stream(llm, PROMPTS[0], PARAMS[0]).task
        assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids
        return outputs

    with namespaces(2) as hosts, ExitStack() as running:
        processes = [running.enter_context(headless(host, rank)) for rank, host in enumerate(hosts, 1)]
        for process in processes:
            running.callback(process.terminate)
        with engine(Path(model["model"]), step_seconds=0.005, **settings) as (llm, recorder):
            outputs = run(llm, main)
            assert recorder.num_replayed >= 3
        processes[1].terminate()
        assert processes[1].wait(30) == 0
        ready = [process.stdout.read().splitlines() for process in processes if process.stdout is not None]
    assert [len(lines) for lines in ready] == [1, 2], "each time that it had joined"
    assert ready[0][0].startswith("quire: ready data_parallel_rank=1 front=198.51.100.")
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)
