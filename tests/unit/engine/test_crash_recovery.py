"""Engine cores are killed and stopped under live requests: nothing is lost, said twice, or begun anew.

QUIRE_KILLS=100 make test ARGS="tests/unit/engine/test_crash_recovery.py -k random"     more of it
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from quire_engine import LLM, RequestOutput
from quire_engine.errors import EngineDeadError
from support.engines import Stream, assert_same, engine, kill, offline, params, run, until
from support.oracle import VOCAB_SIZE, make_prompts
from support.processes import state

pytestmark = pytest.mark.slow

NUM_TOKENS = 4
"""The first, of a prefill; the last, with which a request ends; and some between."""
NUM_KILLS = int(os.environ.get("QUIRE_KILLS", "2"))
KILLS_IN_A_ROW = 3
"""At most: with five that die before they give out anything, clients are told that there is no engine."""
SEED = int(os.environ.get("QUIRE_SEED", "1"))
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("tied-gqa", {"tensor_parallel_size": 2}),
    "window": ("mistral", {}),
    "experts": ("qwen3-moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "latent attention": ("deepseek-v3", {}),
    "int8 KV cache": ("tied-gqa", {"kv_cache_dtype": "int8"}),
}
PROMPTS = [[2 + i, 3, 5 * i + 2] for i in range(16)]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


def test_killed_at_every_token_of_a_request(folder: Path, fault: Callable[..., Path]) -> None:
    sampling_params = params(temperature=0.9, seed=5, max_tokens=NUM_TOKENS, logprobs=1)
    (expected,) = offline(folder, [[5, 6, 7]], sampling_params)

    async def killed_at(num_tokens: int) -> None:
        file = fault(action="kill", num_output_tokens=num_tokens, once=True)
        output = await Stream(llm, [5, 6, 7], sampling_params).task
        assert not file.exists(), "it was killed"
        assert_same(output.outputs, expected)
        assert output.metrics is not None
        assert output.metrics.num_output_tokens == NUM_TOKENS
        await until(lambda: recorder.num_restarts == num_tokens)

    async def main() -> None:
        for num_tokens in range(1, NUM_TOKENS + 1):
            await killed_at(num_tokens)

    with engine(folder) as (llm, recorder):
        run(llm, main)
        assert recorder.num_replayed == NUM_TOKENS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_stream_goes_on_where_it_was(folder: Path, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    long = params(max_tokens=400)
    expected = offline(folder, PROMPTS, long)

    async def main() -> None:
        streams = [Stream(llm, prompt, long) for prompt in PROMPTS]
        await until(lambda: sum(stream.num_tokens for stream in streams) > 100)
        dead_pid = llm.engine_pid
        began_at = time.monotonic()
        kill(llm, number)
        await until(lambda: not llm.is_healthy)
        late = Stream(llm, PROMPTS[0], long)  # comes while there is no engine
        await until(lambda: llm.is_healthy)
        print(f"up again {time.monotonic() - began_at:.1f} s after the signal")
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert [output.outputs for output in outputs] == expected
        assert (await late.task).outputs == expected[0]
        assert llm.is_healthy
        assert llm.engine_pid != dead_pid
        assert state(dead_pid) == ""

    with engine(folder, step_seconds=0.005) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1
        assert 1 <= recorder.num_replayed <= len(PROMPTS)
    if number == signal.SIGSTOP:
        assert "(most recent call first)" in capfd.readouterr().err, "the stacks are in the log"


@pytest.mark.parametrize(("name", "settings"), KINDS.values(), ids=KINDS)
def test_models_of_every_kind_go_on(name: str, settings: dict[str, Any], checkpoint: Callable[[str], Path]) -> None:
    """The core is killed, or a rank if there are several; what is said is what one rank says that nobody kills."""
    folder, long, prompts = checkpoint(name), params(max_tokens=60), make_prompts(4, VOCAB_SIZE, max_length=60, seed=2)
    expected = offline(folder, prompts, long, kv_cache_dtype=settings.get("kv_cache_dtype", "auto"))

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, prompt, long) for prompt in prompts]
        await until(lambda: min(stream.num_tokens for stream in streams) > 9)
        assert not any(stream.task.done() for stream in streams)
        os.kill(llm.worker_pids[1] if "tensor_parallel_size" in settings else llm.engine_pid, signal.SIGKILL)
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(folder, step_seconds=0.02, kv_cache_memory_bytes=2**22, **settings) as (llm, recorder):
        outputs = run(llm, main)
        assert (recorder.num_restarts, recorder.num_replayed) == (1, len(prompts))
    assert [output.outputs for output in outputs] == expected


def test_what_is_kept_in_files_is_loaded_after_a_kill_and_after_a_restart(folder: Path, tmp_path: Path) -> None:
    """Long prompts are computed by the first engine alone."""
    extra = {"shared_storage_path": str(tmp_path / "kv")}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    settings: dict[str, Any] = {"kv_transfer_config": transfer, "block_size": 4}
    prompts, sampling_params = make_prompts(4, VOCAB_SIZE, max_length=100, seed=6), params(max_tokens=150)
    expected = offline(folder, prompts, sampling_params, block_size=4)
    num_blocks = len({tuple(prompt[:end]) for prompt in prompts for end in range(4, len(prompt), 4)})

    async def killed() -> None:
        streams = [Stream(llm, prompt, sampling_params) for prompt in prompts]
        await until(lambda: min(stream.num_tokens for stream in streams) > 0)
        await until(lambda: recorder.scheduler_stats.kv_connector.num_saved_blocks >= num_blocks)
        kill(llm)
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert [output.outputs for output in outputs] == expected

    async def asked_again() -> None:
        outputs = await asyncio.gather(*(Stream(llm, prompt, sampling_params).task for prompt in prompts))
        assert [output.outputs for output in outputs] == expected

    with engine(folder, step_seconds=0.02, **settings) as (llm, recorder):
        run(llm, killed)
        assert recorder.num_restarts == 1
        after_kill = recorder.scheduler_stats.kv_connector
    with engine(folder, **settings) as (llm, recorder):
        run(llm, asked_again)
        after_restart = recorder.scheduler_stats.kv_connector
    assert after_kill.num_loaded_blocks >= num_blocks
    assert after_restart.num_loaded_blocks >= num_blocks
    assert after_kill.num_failed_blocks == after_restart.num_failed_blocks == 0


def test_killed_twice_within_seconds(folder: Path) -> None:
    expected = offline(folder, PROMPTS, params())

    async def main() -> None:
        streams = [Stream(llm, prompt, params()) for prompt in PROMPTS]
        await until(lambda: sum(stream.num_tokens for stream in streams) > 50)
        kill(llm)
        num_tokens = sum(stream.num_tokens for stream in streams)
        await until(lambda: recorder.num_restarts == 1)
        await until(lambda: sum(stream.num_tokens for stream in streams) > num_tokens + 20)
        kill(llm)
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert [output.outputs for output in outputs] == expected

    with engine(folder, step_seconds=0.005) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 2


def test_all_that_depends_on_the_output_so_far_goes_on(folder: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 1.0, "seed": 2, "min_tokens": 30, "ignore_eos": False},
        {"temperature": 0.8, "seed": 3, "n": 3, "top_p": 0.9},
        {"temperature": 1.0, "seed": 4, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 5, "bad_words": ["a", "("], "logit_bias": {9: 2.0}},
    ]
    expected = [offline(folder, [[5, 6, 7]], params(**kind))[0] for kind in kinds]

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, [5, 6, 7], params(**kind)) for kind in kinds]
        await until(lambda: min(stream.num_tokens for stream in streams) > 8)
        kill(llm)
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(folder, step_seconds=0.005) as (llm, _):
        outputs = run(llm, main)
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)
    assert outputs[3].prompt_logprobs is not None


def test_grammars_and_stop_strings_go_on(checkpoint: Callable[[str], Path]) -> None:
    tinypy = checkpoint("tinypy")
    prompt = [5, 6, 7]
    free = params(temperature=1.0, seed=7, max_tokens=60)
    undisturbed = LLM(tinypy, dtype="float32")
    text = undisturbed.generate(prompt, free, use_tqdm=False)[0].outputs[0].text
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "[a-f]{50}"}, "ignore_eos": False, "max_tokens": 120},
        {"stop": [text[-9:-5]]},
    ]
    all_params = [params(**{"temperature": 1.0, "seed": 7, "max_tokens": 60, **kind}) for kind in kinds]
    expected = [output.outputs for output in undisturbed.generate([prompt] * 2, all_params, use_tqdm=False)]
    undisturbed.shutdown()
    assert expected[1][0].stop_reason == text[-9:-5]

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, prompt, one) for one in all_params]
        await until(lambda: min(stream.num_tokens for stream in streams) > 4)
        kill(llm)
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(tinypy, step_seconds=0.005) as (llm, _):
        outputs = run(llm, main)
    assert [output.outputs for output in outputs] == expected


@pytest.mark.timeout(120 + 15 * NUM_KILLS)
def test_kills_at_random_blame_and_change_nobody(checkpoint: Callable[[str], Path]) -> None:
    """Whatever the engine is at, also while it starts."""
    tinypy = checkpoint("tinypy")
    random = Random(SEED)
    print(f"seed {SEED}")
    kinds = [params(temperature=0.9, seed=number, max_tokens=200) for number in range(4)] + [
        params(temperature=0.9, seed=number, max_tokens=200, structured_outputs={"regex": rf"[a-z]{{{150 + number}}}"},
               ignore_eos=False)
        for number in range(4)
    ]  # fmt: skip
    undisturbed = LLM(tinypy, dtype="float32")
    expected = [output.outputs for output in undisturbed.generate([[5, 6, 7]] * len(kinds), kinds, use_tqdm=False)]
    undisturbed.shutdown()

    async def ask(number: int) -> None:
        while not ends:
            assert_same((await Stream(llm, [5, 6, 7], kinds[number]).task).outputs, expected[number])

    async def main() -> None:
        clients = [asyncio.ensure_future(ask(number)) for number in range(len(kinds))]
        for number in range(NUM_KILLS):
            num_steps = len(recorder.iterations)
            if number % KILLS_IN_A_ROW == 0:
                await until(lambda before=num_steps: len(recorder.iterations) > before, 120)
            await asyncio.wait(clients, timeout=random.uniform(0.1, 9.0), return_when=asyncio.FIRST_EXCEPTION)
            with contextlib.suppress(ProcessLookupError):  # the next one is not there yet
                kill(llm)
        ends.append(True)
        await asyncio.gather(*clients)

    ends: list[bool] = []
    with engine(tinypy, step_seconds=0.01) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts <= NUM_KILLS


def test_aborts_while_there_is_no_engine(folder: Path) -> None:
    async def main() -> None:
        stays, goes = Stream(llm, PROMPTS[0], params()), Stream(llm, PROMPTS[1], params(), request_id="goes")
        await until(lambda: goes.num_tokens > 0)
        kill(llm)
        await until(lambda: not llm.is_healthy)
        llm.abort("goes")
        assert (await goes.task).outputs[0].finish_reason == "abort"
        assert (await stays.task).outputs == expected

    (expected,) = offline(folder, PROMPTS[:1], params())
    with engine(folder, step_seconds=0.005) as (llm, recorder):
        run(llm, main)
        assert recorder.num_replayed in (1, 2)


def test_without_replay_live_requests_fail_and_later_ones_do_not(folder: Path) -> None:
    async def main() -> None:
        streams = [Stream(llm, prompt, params(max_tokens=300)) for prompt in PROMPTS[:3]]
        await until(lambda: streams[0].num_tokens > 0)
        kill(llm)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
                await stream.task
        with pytest.raises(EngineDeadError, match="being started again"):
            await Stream(llm, PROMPTS[0], params()).task
        await until(lambda: llm.is_healthy)
        assert (await Stream(llm, PROMPTS[0], params()).task).finished

    with engine(folder, step_seconds=0.005, replay_on_crash=False) as (llm, recorder):
        run(llm, main)
        assert (recorder.num_restarts, recorder.num_replayed) == (1, 0)


def test_queue_bound_refuses_no_replay(folder: Path) -> None:
    expected = offline(folder, PROMPTS[:4], params())

    async def main() -> None:
        streams = [Stream(llm, prompt, params()) for prompt in PROMPTS[:2]]
        await until(lambda: min(stream.num_tokens for stream in streams) > 0)
        streams += [Stream(llm, prompt, params()) for prompt in PROMPTS[2:4]]
        await asyncio.sleep(0)
        kill(llm)
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert [output.outputs for output in outputs] == expected

    with engine(folder, max_num_seqs=2, max_queued_requests=2, max_queue_delay_ms=20_000) as (llm, _):
        run(llm, main)
