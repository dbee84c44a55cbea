"""Engine cores are killed, stopped and poisoned under live requests: nothing is lost, said twice, or begun anew."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire_engine import LLM, AsyncLLM, EngineConfig, RequestOutput, RequestOutputKind, SamplingParams
from quire_engine.core import supervisor
from quire_engine.errors import EngineDeadError, EngineUnavailableError
from quire_engine.outputs import CompletionOutput
from quire_engine.stats import IterationStats, SchedulerStats
from quire_engine.worker.fault_injection import FAULT_INJECTION_VARIABLE

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
PROMPTS = [[2 + i, 3, 5 * i + 2] for i in range(16)]


class Recorder:
    """A StatLogger that adds up."""

    def __init__(self) -> None:
        self.num_restarts = 0
        self.num_replayed = 0

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        self.num_restarts += iteration_stats.num_engine_restarts
        self.num_replayed += iteration_stats.num_requests_replayed


@contextlib.contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[tuple[AsyncLLM, Recorder]]:
    recorder = Recorder()
    config = EngineConfig.from_settings({"model": str(folder), "dtype": "float32", **settings})
    llm = AsyncLLM(config, [recorder])
    try:
        yield llm, recorder
    finally:
        llm.shutdown()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 40, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA, **fields}
    )


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Let the loop run until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.005)


class Stream:
    """One request: its deltas put together, and how many tokens have come."""

    def __init__(self, llm: AsyncLLM, prompt: list[int], sampling_params: SamplingParams, **options: Any) -> None:
        self.output: RequestOutput | None = None
        self.num_tokens = 0
        self.task = asyncio.ensure_future(self._run(llm.generate(prompt, sampling_params, **options)))

    async def _run(self, outputs: Any) -> RequestOutput:
        async for delta in outputs:
            if self.output is None:
                self.output = delta
            else:
                self.output.merge(delta)
            self.num_tokens = sum(len(one.token_ids) for one in self.output.outputs)
        assert self.output is not None
        return self.output


def run(llm: AsyncLLM, main: Callable[[], Awaitable[Any]]) -> Any:
    async def started() -> Any:
        await llm.start()
        return await main()

    return asyncio.run(started())


def kill(llm: AsyncLLM, number: int = signal.SIGKILL) -> None:
    os.kill(llm.engine_pid, number)


def assert_same(outputs: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    """Equal, up to the rounding of log-probabilities: a token that is computed with others is rounded differently."""
    assert [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in outputs] == [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in expected
    ]
    for one, other in zip(outputs, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert {i: item.logprob for i, item in mine.items()} == pytest.approx(
                {i: item.logprob for i, item in theirs.items()}, abs=1e-4
            )


def offline(folder: Path, prompts: list[list[int]], sampling_params: SamplingParams, **settings: Any) -> list[Any]:
    outputs = LLM(folder, dtype="float32", **settings).generate(prompts, sampling_params, use_tqdm=False)
    return [output.outputs for output in outputs]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Has workers fail; see `quire_engine.worker.fault_injection`."""
    file = tmp_path / "fault.json"
    monkeypatch.setenv(FAULT_INJECTION_VARIABLE, str(file))

    def write(**fields: Any) -> Path:
        file.write_bytes(msgspec.json.encode(fields))
        return file

    return write


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


def test_a_poison_request_ends_alone(folder: Path, fault: Callable[..., Path]) -> None:
    expected = offline(folder, PROMPTS, params())
    sampled = {token_id for outputs in expected for token_id in outputs[0].token_ids}
    poison = next(token_id for token_id in range(2, 500) if token_id not in sampled)
    fault(action="kill", token_id=poison)

    async def main() -> None:
        streams = [Stream(llm, prompt, params()) for prompt in PROMPTS]
        culprit = Stream(llm, [5, 6], params(allowed_token_ids=[poison]))
        with pytest.raises(EngineDeadError, match="died of this request again and again"):
            await culprit.task
        for stream, outputs in zip(streams, expected, strict=True):
            assert_same((await stream.task).outputs, outputs)
        assert llm.is_healthy

    with engine(folder) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
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
        assert not Path(f"/proc/{dead_pid}").exists()

    with engine(folder) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1
        assert 1 <= recorder.num_replayed <= len(PROMPTS)
    if number == signal.SIGSTOP:
        assert "Current thread" in capfd.readouterr().err, "the stacks are in the log"


def test_a_step_that_never_ends_is_found(
    folder: Path, fault: Callable[..., Path], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = offline(folder, PROMPTS, params())
    fault(action="hang", num_output_tokens=20, once=True)

    async def main() -> None:
        streams = [Stream(llm, prompt, params()) for prompt in PROMPTS]
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert [output.outputs for output in outputs] == expected

    with engine(folder, step_timeout_s=2) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1
    assert "fault_injection.py" in capfd.readouterr().err, "the stack of the hung thread is in the log"
    assert "the engine hangs: step 2" in caplog.text
    assert "its oldest request is " in caplog.text


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

    with engine(folder) as (llm, recorder):
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

    with engine(folder) as (llm, _):
        outputs = run(llm, main)
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)
    assert outputs[3].prompt_logprobs is not None


def test_grammars_and_stop_strings_go_on(checkpoint: Callable[[str], Path]) -> None:
    tinypy = checkpoint("tinypy")
    prompt = [5, 6, 7]
    free = params(temperature=1.0, seed=7, max_tokens=60)
    text = offline(tinypy, [prompt], free)[0][0].text
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "[a-f]{50}"}, "ignore_eos": False, "max_tokens": 120},
        {"stop": [text[-9:-5]]},
    ]
    all_params = [params(**{"temperature": 1.0, "seed": 7, "max_tokens": 60, **kind}) for kind in kinds]
    expected = [offline(tinypy, [prompt], one)[0] for one in all_params]
    assert expected[1][0].stop_reason == text[-9:-5]

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, prompt, one) for one in all_params]
        await until(lambda: min(stream.num_tokens for stream in streams) > 4)
        kill(llm)
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(tinypy) as (llm, _):
        outputs = run(llm, main)
    assert [output.outputs for output in outputs] == expected


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
    with engine(folder) as (llm, recorder):
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

    with engine(folder, replay_on_crash=False) as (llm, recorder):
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


def test_an_engine_that_does_not_stay_alive_is_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_FRUITLESS_DEATHS", 2)
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params(max_tokens=400))
        await until(lambda: stream.num_tokens > 0)
        (copy / "model.safetensors").unlink()
        kill(llm)
        with pytest.raises(EngineDeadError, match=r"times in a row.*there is no model\.safetensors"):
            await stream.task
        assert not llm.is_healthy
        assert llm.dead_error is not None
        with pytest.raises(EngineDeadError, match="times in a row"):
            await Stream(llm, PROMPTS[0], params()).task

    with engine(copy) as (llm, _):
        run(llm, main)


def test_shutdown_while_an_engine_is_being_started(folder: Path) -> None:
    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params(max_tokens=400))
        await until(lambda: stream.num_tokens > 0)
        kill(llm)
        await until(lambda: not llm.is_healthy)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream.task

    with engine(folder) as (llm, _):
        run(llm, main)
        assert not Path(f"/proc/{llm.engine_pid}").exists()


def test_an_engine_that_slept_sleeps_again(folder: Path) -> None:
    async def main() -> None:
        assert (await Stream(llm, PROMPTS[0], params()).task).finished
        await llm.sleep(2)
        kill(llm)
        await until(lambda: recorder.num_restarts == 1)
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert (await Stream(llm, PROMPTS[0], params()).task).finished

    with engine(folder) as (llm, recorder):
        run(llm, main)


def test_who_waits_for_a_grammar_does_not_hang(checkpoint: Callable[[str], Path]) -> None:
    async def main() -> None:
        structured = params(structured_outputs={"regex": "[a-f]{8}"}, ignore_eos=False)
        assert (await Stream(llm, PROMPTS[0], structured).task).finished  # now there is a compiler
        threads = Path(f"/proc/{llm.engine_pid}/task").iterdir()
        (compiler,) = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
        os.kill(compiler, signal.SIGSTOP)
        try:
            waiting = Stream(llm, PROMPTS[0], params(structured_outputs={"regex": "[g-k]{8}"}, ignore_eos=False))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting.task), 1.5 * step_timeout_s)
        finally:
            os.kill(compiler, signal.SIGCONT)
        assert (await waiting.task).finished

    step_timeout_s = 3.0
    with engine(checkpoint("tinypy"), step_timeout_s=step_timeout_s) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 0


def test_an_engine_that_is_stopped_while_it_starts_is_found(folder: Path) -> None:
    expected = offline(folder, PROMPTS[:1], params())

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params())
        await until(lambda: stream.num_tokens > 0)
        first_pid = llm.engine_pid
        kill(llm)
        await until(lambda: llm.engine_pid != first_pid)
        kill(llm, signal.SIGSTOP)
        assert (await stream.task).outputs == expected[0]

    with engine(folder) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1


def test_requests_that_were_held_do_not_keep_an_engine_awake(folder: Path) -> None:
    async def main() -> None:
        await llm.sleep(1)
        kill(llm)
        await until(lambda: not llm.is_healthy)
        with pytest.raises(EngineUnavailableError, match="sleeps"):
            await Stream(llm, PROMPTS[0], params()).task
        assert await llm.is_sleeping()

    with engine(folder) as (llm, _):
        run(llm, main)


def test_shutdown_as_the_next_engine_is_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_client(client: supervisor.SupervisedClient) -> None:
        actual(client)
        client.shutdown()

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params(max_tokens=400))
        await until(lambda: stream.num_tokens > 0)
        kill(llm)
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream.task

    actual = supervisor.SupervisedClient._replace_client
    monkeypatch.setattr(supervisor.SupervisedClient, "_replace_client", replace_client)
    with engine(folder) as (llm, _):
        run(llm, main)
