"""AsyncLLM: the engine core in a process of its own, which is there when needed and gone when not."""

import asyncio
import copy
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams
from quire_engine.errors import CheckpointError, EngineDeadError, RequestError
from quire_engine.messages import EngineCoreRequest, RequestType
from quire_engine.outputs import RequestOutput
from support.checkpoints import edit_json
from support.engines import Recorder, SharedEngine, engine, shared_engine, until
from support.processes import eventually, idles, is_gone, start_forked

pytestmark = pytest.mark.slow

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(checkpoint: Callable[[str], Path]) -> Iterator[SharedEngine]:
    with shared_engine(checkpoint("tied-gqa"), step_seconds=0.005) as running:  # streams are looked at while they run
        yield running


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params)]
    return outputs[-1]


def test_concurrent_requests_equal_the_offline_engine(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("tied-gqa")
    prompts = [[2 + i, 3, 5 * i + 2] for i in range(20)]
    expected = LLM(folder, dtype="float32").generate(prompts, LONG, use_tqdm=False)

    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(collect(llm, prompt, LONG) for prompt in prompts))

    with tempfile.TemporaryDirectory() as sockets:
        monkeypatch.setattr(tempfile, "tempdir", sockets)
        with engine(folder) as (llm, recorder):
            outputs = asyncio.run(main(llm))
            assert list(Path(sockets).iterdir()) == [], "the sockets are left on disk"
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert recorder.scheduler_stats is not None
    assert recorder.scheduler_stats.num_blocks_used == 0
    assert sum(stats.num_generation_tokens for stats in recorder.iterations) == 20 * 200
    assert len(recorder.finished) == 20
    for one in recorder.finished:
        assert one.time_to_first_token_seconds is not None
        assert 0 < one.time_to_first_token_seconds <= one.e2e_seconds


def test_output_kinds(checkpoint: Callable[[str], Path], shared: SharedEngine) -> None:
    def params(kind: RequestOutputKind) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, output_kind=kind, logprobs=1, prompt_logprobs=2
        )

    async def outputs(llm: AsyncLLM, kind: RequestOutputKind) -> list[RequestOutput]:
        return [copy.deepcopy(output) async for output in llm.generate([5, 6, 7], params(kind))]

    async def main(llm: AsyncLLM) -> list[list[RequestOutput]]:
        return [await outputs(llm, kind) for kind in RequestOutputKind]

    folder = checkpoint("tied-gqa")
    expected = LLM(folder, dtype="float32").generate([5, 6, 7], params(RequestOutputKind.DELTA), use_tqdm=False)[0]
    cumulative, deltas, final = shared.run(lambda: main(shared.llm))
    assert cumulative[-1].outputs == final[0].outputs == expected.outputs
    assert cumulative[-1].prompt_logprobs == final[0].prompt_logprobs == expected.prompt_logprobs is not None
    assert len(final) == 1
    for stream in (cumulative, deltas):
        assert len(stream) > 1
        assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
    lengths = [len(output.outputs[0].token_ids) for output in cumulative]
    assert lengths == sorted(set(lengths)), "each holds more than the one before"
    assert all(output.outputs[0].text.startswith(cumulative[0].outputs[0].text) for output in cumulative)
    assert all(output.prompt_logprobs == expected.prompt_logprobs for output in cumulative)
    whole = deltas[0]
    assert whole.prompt_logprobs is not None
    for delta in deltas[1:]:
        assert delta.prompt_logprobs is None
        whole.merge(delta)
    assert whole.outputs == expected.outputs


def test_the_callers_trace_context_reaches_the_statistics(shared: SharedEngine) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def main(llm: AsyncLLM) -> None:
        async for _ in llm.generate([5, 6, 7], SamplingParams(max_tokens=2), traceparent=traceparent):
            pass

    shared.run(lambda: main(shared.llm))
    (finished,) = shared.recorder.finished
    assert finished.options.traceparent == traceparent


def test_abort_frees_blocks_and_ends_the_request(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM, recorder: Recorder) -> None:
        await llm.start()
        outputs: list[RequestOutput] = []
        request = llm.input_processor.process([5, 6, 7], LONG)
        llm.add_request(request, outputs.append)
        await until(lambda: len(outputs) > 3)
        llm.abort(request.request_id)
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await until(lambda: recorder.scheduler_stats is not None and recorder.scheduler_stats.num_blocks_used == 0)
        llm.abort(request.request_id)  # again: nothing happens
        async for _ in llm.generate([5, 6, 7], LONG):
            break  # leaving early aborts
        await until(lambda: recorder.scheduler_stats is not None and recorder.scheduler_stats.num_running == 0)
        assert (await collect(llm, [5, 6, 7], SamplingParams(max_tokens=3))).finished

    with engine(checkpoint("tied-gqa"), step_seconds=0.1) as (llm, recorder):  # the abort is there before the end
        asyncio.run(main(llm, recorder))


def test_a_message_that_does_not_decode_ends_only_that_request(shared: SharedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        await llm.start()
        outputs: list[RequestOutput] = []
        good = llm.input_processor.process([5, 6], SamplingParams(max_tokens=2))
        for payload in (b"", b"\xc1", b"\x93\xa1x\x91\x05\x81\xabtemperature\xcb\xbf\xf0\x00\x00\x00\x00\x00\x00"):
            bad = EngineCoreRequest(f"bad-{len(outputs)}", [1], good.sampling_params)
            llm._output_processor.add_request(bad, outputs.append)
            llm._client.replicas[0].link._send(RequestType.ADD, bad.request_id, payload)
            await until(lambda: bool(outputs) and outputs[-1].finished)
            assert outputs[-1].outputs[0].finish_reason == "error"
            assert outputs[-1].error
            outputs.clear()
        assert (await collect(llm, [5, 6], SamplingParams(max_tokens=2))).finished

    shared.run(lambda: main(shared.llm))


def test_bad_requests_are_refused_at_the_edge(shared: SharedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="token id -1"):
            await collect(llm, [-1], LONG)
        assert (await collect(llm, [5], SamplingParams(max_tokens=2))).finished

    shared.run(lambda: main(shared.llm))


def test_the_engine_dies_with_its_parent(checkpoint: Callable[[str], Path]) -> None:
    script = (
        "import sys; from quire_engine import AsyncLLM, EngineConfig\n"
        "llm = AsyncLLM(EngineConfig.from_settings({'model': sys.argv[1]}))\n"
        "print(llm.engine_pid, flush=True); sys.stdin.read()\n"
    )
    parent = start_forked(script, str(checkpoint("tied-gqa")))
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    assert eventually(lambda: is_gone(pid)), "the engine outlived its parent"


def test_start_up_errors_are_the_engines_own(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = str(checkpoint("tied-gqa"))
    for settings, message in [
        ({"model": folder, "max_model_len": 100_000}, "max_position_embeddings"),
        ({"model": folder, "kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes"),
    ]:
        with pytest.raises(EngineDeadError, match=message):
            AsyncLLM(EngineConfig.from_settings(settings))
    shutil.copytree(folder, tmp_path / "misshapen")
    edit_json(tmp_path / "misshapen" / "config.json", intermediate_size=97)
    with pytest.raises(EngineDeadError, match=r"config\.json asks for \((97, 64|64, 97)\)"):
        AsyncLLM(EngineConfig.from_settings({"model": str(tmp_path / "misshapen")}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        AsyncLLM(EngineConfig.from_settings({"model": str(tmp_path)}))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        AsyncLLM(EngineConfig.from_settings({"model": folder, "tokenizer": str(tmp_path)}))


def test_an_idle_engine_uses_no_cpu(checkpoint: Callable[[str], Path]) -> None:
    """Once it has taken in the grammar compiler, which is ready some time after it."""

    async def main(llm: AsyncLLM) -> None:
        await collect(llm, [5], SamplingParams(max_tokens=2))
        assert await idles(llm.engine_pid, most=0.03, seconds=1.5)  # idle check included

    with engine(checkpoint("tied-gqa")) as (llm, _):
        asyncio.run(main(llm))


def test_a_sink_that_raises_ends_only_its_own_request(shared: SharedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        await llm.start()
        broken: list[RequestOutput] = []

        def sink(output: RequestOutput) -> None:
            broken.append(output)
            if len(broken) == 3:
                raise RuntimeError("a sink failed")

        llm.add_request(llm.input_processor.process([5, 6, 7], LONG), sink)
        neighbour = await collect(llm, [5, 6, 7], LONG)
        assert len(neighbour.outputs[0].token_ids) == 200
        assert broken[-1].finished
        assert broken[-1].outputs[0].finish_reason == "error"
        assert llm.is_healthy

    shared.run(lambda: main(shared.llm))


def test_outputs_that_cannot_be_taken_in_are_an_engines_death(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(llm: AsyncLLM) -> None:
        await collect(llm, [5], SamplingParams(max_tokens=2))

        def fails(*_: object) -> None:
            raise RuntimeError("a logger failed")

        monkeypatch.setattr(llm, "_record", fails)
        request = asyncio.ensure_future(collect(llm, [5, 6, 7], LONG))
        await until(lambda: not llm.is_healthy)
        monkeypatch.undo()
        with pytest.raises(EngineDeadError, match="cannot be taken in"):
            await collect(llm, [5], LONG)
        request.cancel()

    with engine(checkpoint("tied-gqa")) as (llm, _):
        asyncio.run(main(llm))


def test_shutdown_leaves_nobody_waiting(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM) -> None:
        requests = [asyncio.ensure_future(collect(llm, [5, 6, i + 2], LONG)) for i in range(8)]
        await asyncio.sleep(0)
        await asyncio.to_thread(llm.shutdown)
        ended = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 20)
        assert all(isinstance(one, EngineDeadError | RequestOutput) for one in ended)

    with engine(checkpoint("tied-gqa")) as (llm, _):
        asyncio.run(main(llm))


def test_the_engine_imports_nothing_from_the_working_directory(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zmq.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    with engine(checkpoint("tied-gqa")) as (llm, _):
        assert llm.is_healthy


def test_sigterm_to_the_group_does_not_end_the_engine(checkpoint: Callable[[str], Path]) -> None:
    with engine(checkpoint("tied-gqa")) as (llm, _):
        os.kill(llm.engine_pid, signal.SIGTERM)
        assert asyncio.run(collect(llm, [5], SamplingParams(max_tokens=2))).finished


def test_a_temporary_folder_too_long_for_sockets_is_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ValueError, match=r"TMPDIR is .* too long"):
        AsyncLLM(EngineConfig.from_settings({"model": str(checkpoint("tied-gqa"))}))
    assert list(folder.iterdir()) == []


def test_a_deadline_in_the_far_future_is_no_trouble(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM) -> None:
        for deadline_ms in (2.0**31 + 1000, 2.0**64 / 1000):
            params = SamplingParams(max_tokens=3, structured_outputs={"regex": "[ef]+"})  # type: ignore[arg-type]
            outputs = [o async for o in llm.generate([5], params, deadline_ms=deadline_ms)]
            assert outputs[-1].finished
        assert llm.is_healthy

    with engine(checkpoint("tinypy")) as (llm, _):
        asyncio.run(main(llm))


def test_ids_of_callers_cannot_meet_those_of_sequences(shared: SharedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        async def one(request_id: str, n: int) -> RequestOutput:
            params = SamplingParams(max_tokens=50, n=n, seed=1, ignore_eos=True)
            return [o async for o in llm.generate([5, 6], params, request_id)][-1]

        outputs = await asyncio.gather(one("0_x", 1), one("1_x", 1), one("x", 3))
        assert [len(output.outputs) for output in outputs] == [1, 1, 3]
        assert all(len(one.token_ids) == 50 for output in outputs for one in output.outputs)

    shared.run(lambda: main(shared.llm))
