"""The watch over an engine core: what hangs is found, what is at fault is blamed, what cannot live is given up."""

import asyncio
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import zmq
from quire_engine.errors import EngineDeadError, EngineUnavailableError
from quire_engine.frontend.chat_template import ChatTemplateRenderer
from quire_engine.replicas.local_replica import LocalReplica
from quire_engine.system import crash_loop
from support.engines import Stream, assert_same, engine, kill, offline, params, run, until
from support.processes import children, is_gone, open_descriptors, state
from support.serving import wait_until

pytestmark = pytest.mark.slow

PROMPTS = [[2 + i, 3, 5 * i + 2] for i in range(16)]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


def test_a_poison_request_ends_alone(folder: Path, fault: Callable[..., Path]) -> None:
    expected = offline(folder, PROMPTS, params())
    sampled = {token_id for outputs in expected for token_id in outputs[0].token_ids}
    poison = next(token_id for token_id in range(2, 500) if token_id not in sampled)
    fault(action="kill", token_id=poison)

    async def main() -> None:
        streams = [Stream(llm, prompt, params()) for prompt in PROMPTS]
        faulty = Stream(llm, [5, 6], params(allowed_token_ids=[poison]))
        with pytest.raises(EngineDeadError, match="died of this request again and again"):
            await faulty.task
        for stream, outputs in zip(streams, expected, strict=True):
            assert_same((await stream.task).outputs, outputs)
        assert llm.is_healthy

    with engine(folder) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 4


def test_a_step_that_never_ends_is_found(
    folder: Path, fault: Callable[..., Path], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = offline(folder, PROMPTS, params())
    fault(action="hang", num_output_tokens=20, once=True)

    async def main() -> None:
        streams = [Stream(llm, prompt, params()) for prompt in PROMPTS]
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert [output.outputs for output in outputs] == expected

    with engine(folder, step_timeout_s=4) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1
    assert "fault_injection.py" in capfd.readouterr().err, "the stack of the hung thread is in the log"
    assert "the engine hangs: step 2" in caplog.text
    assert "its oldest request is " in caplog.text


@pytest.fixture
def own_copy(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may harm."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def test_nobody_waits_for_engines_that_die_and_the_next_that_lives_serves(
    own_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_loop, "MAX_DEATHS", 2)
    weights, away = own_copy / "model.safetensors", own_copy / "away"

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params(max_tokens=400))
        await until(lambda: stream.num_tokens > 0)
        weights.rename(away)
        kill(llm)
        why = r"is not running.* 2 times in a row.*there is no model\.safetensors.* tried again in"
        with pytest.raises(EngineUnavailableError, match=why) as ended:
            await stream.task
        assert ended.value.retry_after_seconds is not None
        assert not llm.is_healthy
        assert llm.dead_error is None
        with pytest.raises(EngineUnavailableError, match=r"2 times in a row.*no model\.safetensors") as refused:
            await Stream(llm, PROMPTS[0], params()).task
        assert refused.value.retry_after_seconds is not None
        with pytest.raises(EngineUnavailableError, match="times in a row"):
            await llm.reset_prefix_cache()
        assert "no model.safetensors" in str(llm.outage)
        away.rename(weights)
        await until(lambda: llm.is_healthy)
        assert llm.outage is None
        assert (await Stream(llm, PROMPTS[0], params()).task).outputs == expected[0]

    expected = offline(own_copy, PROMPTS[:1], params())
    with engine(own_copy, step_seconds=0.005) as (llm, _):
        run(llm, main)


def test_what_was_asked_of_an_engine_before_the_breaker_tripped_ends(
    own_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_loop, "MAX_DEATHS", 2)

    async def main() -> None:
        (own_copy / "model.safetensors").unlink()
        kill(llm)
        await until(lambda: not llm.is_healthy)
        with pytest.raises(EngineUnavailableError, match="times in a row"):
            await llm.reset_prefix_cache()

    with engine(own_copy) as (llm, _):
        run(llm, main)


def test_engines_are_started_again_when_there_are_descriptors_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_loop, "MAX_DEATHS", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params(max_tokens=400))
        await until(lambda: stream.num_tokens > 0)
        before = open_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            kill(llm)
            with pytest.raises(EngineUnavailableError, match="Too many open files"):
                await stream.task
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: llm.is_healthy)
        assert (await Stream(llm, PROMPTS[0], params()).task).finished
        assert len(open_descriptors()) <= len(before), "attempts that failed have left some open"

    with engine(folder, step_seconds=0.005) as (llm, _):
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

    with engine(folder, step_seconds=0.005) as (llm, _):
        run(llm, main)
        assert state(llm.engine_pid) == ""


def test_an_engine_is_started_again_while_conversations_are_rendered(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering, may_end = threading.Event(), threading.Event()

    def slow(messages: Any) -> list[int]:
        rendering.set()
        assert may_end.wait(60)
        return [5, 6, 7]

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # has few threads, on a small machine
        chat = asyncio.ensure_future(anext(llm.chat([{"role": "user", "content": "a"}], params(max_tokens=1))))
        await until(rendering.is_set)
        kill(llm)
        try:
            await until(lambda: not llm.is_healthy)
            await until(lambda: llm.is_healthy)
        finally:
            may_end.set()
        assert (await chat).finished

    with engine(checkpoint("tied-gqa")) as (llm, _):
        monkeypatch.setattr(llm.input_processor, "apply_chat_template", slow)
        run(llm, main)


def test_shutdown_ends_what_is_rendered(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No renderer ends by itself: its limit of processor time is longer than the test's."""
    monkeypatch.setattr(ChatTemplateRenderer, "__init__", partialmethod(ChatTemplateRenderer.__init__, 600.0))
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3

    async def main() -> None:
        chats = [
            asyncio.ensure_future(anext(llm.chat([{"role": "user", "content": "a"}], params(max_tokens=1))))
            for _ in range(3)
        ]
        renderers = llm.input_processor._conversations._all
        await until(lambda: renderers and renderers[0]._process is not None)
        pid = renderers[0]._process.pid
        await asyncio.to_thread(llm.shutdown)
        for chat in chats:
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                await chat
        assert is_gone(pid)

    with engine(checkpoint("tied-gqa")) as (llm, _):
        llm.input_processor.tokenizer.chat_template = loops
        run(llm, main)


def test_an_engine_that_slept_sleeps_again(folder: Path) -> None:
    async def main() -> None:
        assert (await Stream(llm, PROMPTS[0], params()).task).finished
        await llm.sleep(2)
        kill(llm)
        await until(lambda: not llm.is_healthy)
        recorder.scheduler_stats = None
        await until(lambda: recorder.scheduler_stats is not None and recorder.scheduler_stats.sleep_level == 2)
        assert recorder.num_restarts == 1
        await llm.wake_up()
        assert (await Stream(llm, PROMPTS[0], params()).task).finished

    with engine(folder) as (llm, recorder):
        run(llm, main)


def test_who_waits_for_a_stopped_grammar_compiler_gets_another(checkpoint: Callable[[str], Path]) -> None:
    async def main() -> None:
        structured = params(structured_outputs={"regex": "[a-f]{8}"}, ignore_eos=False)
        assert (await Stream(llm, PROMPTS[0], structured).task).finished
        (compiler,) = children(llm.engine_pid)
        os.kill(compiler, signal.SIGSTOP)
        waiting = Stream(llm, PROMPTS[0], params(structured_outputs={"regex": "[g-k]{8}"}, ignore_eos=False))
        assert (await waiting.task).finished
        assert children(llm.engine_pid) != [compiler]

    with engine(checkpoint("tinypy"), step_timeout_s=3.0) as (llm, recorder):
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

    with engine(folder, step_seconds=0.01) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1


def test_requests_that_were_held_do_not_keep_an_engine_awake(folder: Path) -> None:
    async def main() -> None:
        await llm.sleep(1)
        kill(llm)
        await until(lambda: not llm.is_healthy)
        recorder.scheduler_stats = None
        with pytest.raises(EngineUnavailableError, match="sleeps"):
            await Stream(llm, PROMPTS[0], params()).task
        await until(lambda: recorder.scheduler_stats is not None and recorder.scheduler_stats.sleep_level == 1)

    with engine(folder) as (llm, recorder):
        run(llm, main)


def test_shutdown_as_the_next_engine_is_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_next(replica: LocalReplica) -> None:
        actual(replica)
        replica.shutdown()

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params(max_tokens=400))
        await until(lambda: stream.num_tokens > 0)
        kill(llm)
        with pytest.raises(EngineDeadError, match="shut down"):
            await stream.task

    actual = LocalReplica._start_next
    monkeypatch.setattr(LocalReplica, "_start_next", start_next)
    with engine(folder, step_seconds=0.005) as (llm, _):
        run(llm, main)


def test_a_request_that_comes_between_a_death_and_its_notice_is_replayed(folder: Path) -> None:
    """The socket of an engine that is gone takes nothing: that is no error of a request."""
    expected = offline(folder, PROMPTS[:2], params())

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params())
        await until(lambda: stream.num_tokens > 0)
        kill(llm)
        wait_until(lambda: not socket.poll(0, zmq.POLLOUT), "the socket takes nothing")  # and the loop hears of nothing
        llm.add_request(llm.input_processor.process(PROMPTS[1], params()), outputs.append)
        llm.abort("nobody's")
        await until(lambda: bool(outputs) and outputs[-1].finished, 60)
        assert_same((await stream.task).outputs, expected[0])

    outputs: list[Any] = []
    with engine(folder, step_seconds=0.01) as (llm, recorder):
        socket = llm._client.replicas[0].link._input  # type: ignore[attr-defined]
        run(llm, main)
        assert recorder.num_restarts == 1
    assert [token_id for output in outputs for token_id in output.outputs[0].token_ids] == expected[1][0].token_ids


def test_sockets_that_never_close_keep_no_engine_from_being_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once in thousands of restarts: libzmq waits for the end of a connection whose other side was killed."""

    def wait(context: "zmq.Context[Any]") -> None:
        waiting.append(threading.current_thread())
        ends.wait()
        term(context)

    async def main() -> None:
        stream = Stream(llm, PROMPTS[0], params(max_tokens=400))
        await until(lambda: stream.num_tokens > 0)
        monkeypatch.setattr(zmq.Context, "term", wait)
        kill(llm)
        await stream.task
        assert waiting
        assert stream.num_tokens == 400

    term, ends, waiting = zmq.Context.term, threading.Event(), list[threading.Thread]()
    try:
        with engine(folder, step_seconds=0.005) as (llm, _):
            run(llm, main)
    finally:
        ends.set()
        for thread in waiting:
            thread.join()
