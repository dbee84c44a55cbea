"""The grammar compiler: whatever it is given, it costs one request, and nobody else waits for it."""

import asyncio
import contextlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from quire_engine import AsyncLLM, SamplingParams
from quire_engine.core.core_process import START_NICENESS
from quire_engine.errors import DeadlineExceededError, RequestError
from quire_engine.outputs import RequestOutput
from quire_engine.structured_output import compiler_process
from quire_engine.structured_output.compiler_messages import (
    COMPILE_SECONDS,
    START,
    CompilerArguments,
    CompileRequest,
    CompileResult,
)
from quire_engine.structured_output.compiler_process import CompilerProcess, _explain
from support.engines import Recorder, engine, until
from support.processes import children, command_line, eventually, idles, is_gone

pytestmark = pytest.mark.usefixtures("started_as_ever")  # with what it loads, and the limits that are relative to it
FREE = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


def nested(depth: int) -> str:
    """A schema of objects within objects."""
    return '{"type":"object","required":["a"],"properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


PATHOLOGICAL: dict[str, dict[str, Any]] = {
    "nested objects": {"json": nested(2000)},
    "objects as deep as JSON may be": {"json": nested(450)},
    "nested arrays": {"json": '{"type":"array","items":' * 300 + '{"type":"integer"}' + "}" * 300},
    "nested groups": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "many optional properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    },
    "an enormous enum": {"json": {"enum": [f"{i:05d} and more" for i in range(14_000)]}},
    "many alternatives": {"grammar": "root ::= " + " | ".join(f'"{i:06d}"' for i in range(22_000))},
    "many rules": {
        "grammar": "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1} | "b"\n' for i in range(9000)) + 'r9000 ::= "x"'
    },
    "repetition of repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}b"},
    "a huge repetition": {"regex": "a{1,1000000}"},
    "a doubled quantifier": {"regex": "foo**"},
}


def params(structured_outputs: dict[str, Any], **values: Any) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": 8, "structured_outputs": structured_outputs, **values}
    return SamplingParams.from_mapping(given)


async def collect(llm: AsyncLLM, sampling_params: SamplingParams) -> RequestOutput:
    return [output async for output in llm.generate("x = ", sampling_params)][-1]


def compiler_of(engine_pid: int) -> int:
    """The process id of an engine's grammar compiler."""
    return next(pid for pid in children(engine_pid) if "quire_engine.structured_output.compiler" in command_line(pid))


@pytest.mark.slow
def test_pathological_grammars_end_in_time_and_nobody_waits(checkpoint: Callable[[str], Path]) -> None:
    async def one(llm: AsyncLLM, name: str) -> str:
        try:
            return str((await collect(llm, params(PATHOLOGICAL[name]))).outputs[0].finish_reason)
        except RequestError as error:
            return str(error)

    async def stream(llm: AsyncLLM, times: list[float]) -> RequestOutput:
        last = None
        async for output in llm.generate("import os", FREE):
            times.append(time.monotonic())
            last = output
        assert last is not None
        return last

    async def main(llm: AsyncLLM) -> None:
        await collect(llm, params({"choice": ["warm"]}))
        times: list[float] = []
        reference = await stream(llm, [])
        compiling = asyncio.gather(*(one(llm, name) for name in PATHOLOGICAL))
        while not compiling.done():
            assert (await stream(llm, times)).outputs == reference.outputs
        outcomes = dict(zip(PATHOLOGICAL, await compiling, strict=True))
        longest = max(after - before for before, after in pairwise(times))
        print(f"longest gap between two tokens: {longest * 1e3:.0f} ms; {outcomes}")
        assert longest < 0.9 * COMPILE_SECONDS, "a step waited for the compilation that takes all its time"
        for name, outcome in outcomes.items():
            assert outcome in ("stop", "length") or outcome.startswith(
                ("structured_outputs: ", "structured_outputs is ")
            ), (name, outcome)
        assert "position 5" in outcomes["a doubled quantifier"]
        assert outcomes["a huge repetition"] in ("stop", "length")
        assert f"more than {COMPILE_SECONDS:g} s" in outcomes["many optional properties"]
        assert (await collect(llm, params({"choice": ["well"]}))).outputs[0].text == "well"

    with engine(checkpoint("tinypy"), max_model_len=1024) as (llm, _):
        asyncio.run(main(llm))


def test_who_waits_for_a_grammar_uses_no_cpu_and_can_leave(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM, recorder: Recorder) -> None:
        await collect(llm, params({"choice": ["warm"]}))
        outputs: list[RequestOutput] = []
        request = llm.input_processor.process("x", params(PATHOLOGICAL["many optional properties"]))
        llm.add_request(request, outputs.append)
        await until(lambda: recorder.num_waiting_for_fsm == 1)
        assert await idles(llm.engine_pid, most=0.05)
        assert recorder.num_waiting_for_fsm == 1
        llm.abort(request.request_id)
        await until(lambda: recorder.num_waiting_for_fsm == 0)
        assert (await collect(llm, params({"choice": ["next"]}))).outputs[0].text == "next"

    with engine(checkpoint("tinypy"), max_model_len=256) as (llm, recorder):
        asyncio.run(main(llm, recorder))


def test_a_deadline_passes_while_nothing_runs_but_the_compiler(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM, recorder: Recorder) -> None:
        await collect(llm, params({"choice": ["warm"]}))
        slow = params(PATHOLOGICAL["many optional properties"])
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="while it waited"):  # and not the compiler's error
            _ = [output async for output in llm.generate("x", slow, deadline_ms=700)]
        assert time.monotonic() - started >= 0.7
        await until(lambda: recorder.num_waiting_for_fsm == 0)

        waiting = asyncio.ensure_future(collect(llm, slow))
        await until(lambda: recorder.num_waiting_for_fsm == 1)
        sleeping = asyncio.ensure_future(llm.sleep())
        assert not (await asyncio.wait([sleeping], timeout=0.1))[0], "it waits for the request"
        waiting.cancel()
        await sleeping
        assert await llm.is_sleeping()

    with engine(checkpoint("tinypy"), max_model_len=256) as (llm, recorder):
        asyncio.run(main(llm, recorder))


@pytest.mark.slow
def test_a_killed_compiler_loses_nothing(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM, recorder: Recorder) -> None:
        await collect(llm, params({"choice": ["warm"]}))
        for signum in (signal.SIGKILL, signal.SIGUSR1):
            schema = {**PATHOLOGICAL["many optional properties"]["json"], "title": str(signum)}
            slow = asyncio.ensure_future(collect(llm, params({"json": schema})))
            await until(lambda: recorder.num_waiting_for_fsm == 1)
            pid = compiler_of(llm.engine_pid)
            os.kill(pid, signum)
            outputs = await asyncio.gather(*(collect(llm, params({"choice": [f"{signum} {i}"]})) for i in range(5)))
            assert [output.outputs[0].text for output in outputs] == [f"{signum} {i}" for i in range(5)]
            assert compiler_of(llm.engine_pid) != pid
            if signum == signal.SIGKILL:
                with pytest.raises(RequestError, match="simplify it"):
                    await slow
            else:
                slow.cancel()

    with engine(checkpoint("tinypy"), max_model_len=256) as (llm, recorder):
        asyncio.run(main(llm, recorder))


class Collected(CompilerProcess):
    """Collects the results themselves."""

    results: dict[int, CompileResult]
    arrived: threading.Condition

    def _on_start(self) -> None:
        pass

    def _on_ready(self, tokenizer_info: str) -> str | None:
        return None

    def _on_result(self, result: CompileResult) -> None:
        with self.arrived:
            self.results[result.job_id] = result
            self.arrived.notify_all()


def compiler(
    folder: Path,
    results: dict[int, CompileResult],
    arrived: threading.Condition,
    kind: type[Collected] = Collected,
) -> CompilerProcess:
    process = kind(CompilerArguments(str(folder), 4096, [1]))
    process.results, process.arrived = results, arrived
    return process


def test_one_bad_grammar_does_not_hold_up_the_others(checkpoint: Callable[[str], Path]) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    try:
        process.submit(CompileRequest(0, "json", json.dumps(PATHOLOGICAL["many optional properties"]["json"])))
        for i in range(1, 6):
            process.submit(CompileRequest(i, "regex", f"a{{{i}}}"))
        with arrived:
            assert arrived.wait_for(lambda: len(results) == 5, 30)
            assert 0 not in results
            assert all(result.error is None for result in results.values())
            assert arrived.wait_for(lambda: len(results) == 6, 30)
        assert "simplify it" in (results[0].error or "")
        assert not results[0].is_our_fault
    finally:
        process.shutdown()


def test_a_tokenizer_that_does_not_load_is_our_fault(tmp_path: Path) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(tmp_path, results, arrived)
    try:
        for job_id in (1, 2):  # the second try starts it again
            process.submit(CompileRequest(job_id, "regex", "a"))
            with arrived:
                assert arrived.wait_for(lambda job_id=job_id: job_id in results, 60)  # type: ignore[misc]
            assert results[job_id].is_our_fault
            assert "cannot start" in (results[job_id].error or "")
    finally:
        process.shutdown()


class Recorded(Collected):
    """Tells what has been begun and goes on to its end: tests strike then."""

    begun: "queue.Queue[int]"

    def _send(self, message: bytes, *descriptors: int) -> None:
        super()._send(message, *descriptors)
        if descriptors:
            job_id, cpu_seconds = START.unpack(message)
            if cpu_seconds == math.inf:
                self.begun.put(job_id)


def recorded(folder: Path, results: dict[int, CompileResult], arrived: threading.Condition) -> Recorded:
    process = compiler(folder, results, arrived, Recorded)
    assert isinstance(process, Recorded)
    process.begun = queue.Queue()
    return process


def strike(process: CompilerProcess, signum: int = signal.SIGKILL) -> None:
    assert process.pid is not None
    os.kill(process.pid, signum)


SLOW = json.dumps(PATHOLOGICAL["many optional properties"]["json"])


@pytest.mark.slow
def test_a_grammar_that_ends_the_compiler_is_refused_by_name_and_alone(checkpoint: Callable[[str], Path]) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = recorded(checkpoint("tinypy"), results, arrived)
    try:
        # Whenever job 1 is begun the process dies, as if that were job 1's doing; job 2 is compiled beside it at first.
        process.submit(CompileRequest(1, "json", SLOW))
        assert process.begun.get(timeout=60) == 1
        process.submit(CompileRequest(2, "json", json.dumps({"type": "integer"})))
        strike(process)
        while 1 not in results:
            with contextlib.suppress(queue.Empty):
                if process.begun.get(timeout=0.1) == 1:
                    strike(process)
        assert results[1].error == "the grammar compiler died 3 times while it compiled this json; simplify it"
        assert not results[1].is_our_fault
        with arrived:
            assert arrived.wait_for(lambda: 2 in results, 60)
        assert results[2].error is None
    finally:
        process.shutdown()
    assert process._thread is None or not process._thread.is_alive()


def test_after_a_death_one_grammar_is_compiled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process = compiler(Path(), {}, threading.Condition())
    monkeypatch.setattr(process, "_ensure_thread", lambda: None)

    def submit(*job_ids: int) -> None:
        for job_id in job_ids:
            process.submit(CompileRequest(job_id, "regex", "a"))

    def running() -> list[int]:
        with process._lock:
            process._start_jobs()
        return [job_id for job_id, job in process._jobs.items() if job.descriptor is not None]

    def end(job_id: int) -> None:
        process.cancel(job_id)
        process._end_job(job_id, 0)

    submit(1, 2)
    assert running() == [1, 2]
    submit(3, 4)
    process._requeue()
    assert running() == [3], "those without a death come first"
    end(3)
    assert running() == [4]
    end(4)
    assert running() == [1]
    submit(5)
    end(1)
    assert running() == [2]
    end(2)
    submit(6)
    assert running() == [5, 6]
    process._requeue()


def test_kills_while_it_starts_fail_nobody(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    starts: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(process, "_on_start", lambda: starts.put(None))
    try:
        process.submit(CompileRequest(1, "choice", json.dumps(["a"])))
        for _ in range(3):
            starts.get(timeout=60)
            strike(process)
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        assert results[1].error is None
    finally:
        process.shutdown()


def test_one_that_never_starts_is_our_fault(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    monkeypatch.setattr(process._closing, "wait", lambda seconds: False)
    monkeypatch.setattr(process, "_on_start", lambda: strike(process))
    try:
        process.submit(CompileRequest(1, "regex", "a"))
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        assert results[1].error == "the grammar compiler cannot start; the server's log says why"
        assert "cannot start: it was killed by SIGKILL, for the 5th time in a row" in caplog.text
        assert results[1].is_our_fault
    finally:
        process.shutdown()


def test_a_stopped_compiler_is_found_and_started_again(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler_process, "OVERDUE_SECONDS", 1.0)
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    try:
        process.submit(CompileRequest(1, "regex", "a"))
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        pid = process.pid
        strike(process, signal.SIGSTOP)
        process.submit(CompileRequest(2, "regex", "b"))
        with arrived:
            assert arrived.wait_for(lambda: 2 in results, 60)
        assert results[2].error is None
        assert process.pid != pid
        assert "the grammar compiler was stopped, or hangs" in caplog.text
    finally:
        process.shutdown()


def test_what_nests_too_deeply_is_said_in_words(checkpoint: Callable[[str], Path]) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    try:
        process.submit(CompileRequest(1, "json", '{"anyOf":[' * 400 + '{"type":"integer"}' + "]}" * 400))
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        assert results[1].error == "the json nests too deeply"
        assert not results[1].is_our_fault
    finally:
        process.shutdown()


@pytest.mark.parametrize("status", [2 << 8, 127 << 8, signal.SIGSEGV, signal.SIGABRT], ids=str)
def test_a_job_without_memory_says_so(status: int) -> None:
    """127 is the dynamic loader's, where C++ has no memory left to raise an exception."""
    result = _explain(CompileRequest(1, "json", "{}"), os.waitstatus_to_exitcode(status))
    assert "takes too much memory or nests too deeply; simplify it" in (result.error or "")
    assert not result.is_our_fault


def test_what_proves_slow_is_known(checkpoint: Callable[[str], Path]) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = recorded(checkpoint("tinypy"), results, arrived)
    try:
        process.submit(CompileRequest(1, "json", SLOW))
        process.submit(CompileRequest(2, "regex", "a"))
        assert process.begun.get(timeout=60) == 1, "in the last round"
        with arrived:
            assert arrived.wait_for(lambda: 2 in results, 60)
        assert process.slow_jobs() == [1]
        process.cancel(1)
        assert process.slow_jobs() == []
    finally:
        process.shutdown()


def test_a_stopped_job_is_begun_again(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "OVERDUE_SECONDS", COMPILE_SECONDS)
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = recorded(checkpoint("tinypy"), results, arrived)
    try:
        process.submit(CompileRequest(1, "json", SLOW))
        assert process.begun.get(timeout=60) == 1
        assert process.pid is not None
        assert eventually(lambda: len(children(process.pid)) == 1)
        (job,) = children(process.pid)
        os.kill(job, signal.SIGSTOP)
        assert process.begun.get(timeout=60) == 1
        assert eventually(lambda: is_gone(job))
        process.cancel(1)
    finally:
        process.shutdown()


def test_a_job_that_somebody_kills_is_our_fault(checkpoint: Callable[[str], Path]) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = recorded(checkpoint("tinypy"), results, arrived)
    try:
        process.submit(CompileRequest(1, "json", SLOW))
        assert process.begun.get(timeout=60) == 1
        assert process.pid is not None
        assert eventually(lambda: len(children(process.pid)) == 1)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        assert "was killed by SIGKILL" in (results[1].error or "")
        assert results[1].is_our_fault
        assert not results[1].cacheable
    finally:
        process.shutdown()


LIMITED = """#!{python}
import ctypes, os, resource, sys
os.nice(3)
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
libc = ctypes.CDLL(None)
for capability in (23, 24):  # to raise priorities and limits: root has them, and no other user
    libc.prctl(24, capability)  # PR_CAPBSET_DROP
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def test_it_compiles_where_it_was_started_with_low_priority_and_little_memory(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(LIMITED.format(python=sys.executable))
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    process._arguments.niceness = START_NICENESS
    try:
        process.submit(CompileRequest(1, "regex", "a"))
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        assert results[1].error is None
        assert process.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= START_NICENESS + 3, "else this shows nothing"
    finally:
        process.shutdown()


def test_it_is_there_before_the_first_grammar_and_again_after_its_death(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    ready: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(process, "_on_ready", ready.put)
    try:
        process.start()
        for _ in range(2):
            assert ready.get(timeout=60)
            strike(process)
        assert ready.get(timeout=60)
        process.submit(CompileRequest(1, "regex", "a"))
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        assert results[1].error is None
    finally:
        process.shutdown()


def test_the_compiler_loads_neither_torch_nor_models(checkpoint: Callable[[str], Path]) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    try:
        process.submit(CompileRequest(1, "json_object", "true"))
        with arrived:
            assert arrived.wait_for(lambda: 1 in results, 60)
        assert results[1].error is None
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libxgrammar" in maps
        assert "libtorch" not in maps
    finally:
        process.shutdown()


def test_a_cancelled_job_makes_room_and_says_nothing(checkpoint: Callable[[str], Path]) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)
    try:
        slow = json.dumps(PATHOLOGICAL["many optional properties"]["json"])
        process.submit(CompileRequest(0, "regex", "a"))
        with arrived:
            assert arrived.wait_for(lambda: 0 in results, 60)
        for job_id in range(1, 13):  # more than run at once
            process.submit(CompileRequest(job_id, "json", slow))
        for job_id in range(1, 13):
            process.cancel(job_id)
        process.submit(CompileRequest(13, "regex", "b"))
        with arrived:
            assert arrived.wait_for(lambda: 13 in results, 60)
        assert results.keys() == {0, 13}
        assert process.pid is not None
        assert eventually(lambda: all(map(is_gone, children(process.pid))))
        assert results.keys() == {0, 13}, "none ended by itself"
    finally:
        process.shutdown()


def test_a_failure_in_the_readers_thread_fails_what_waits_and_starts_afresh(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    results: dict[int, CompileResult] = {}
    arrived = threading.Condition()
    process = compiler(checkpoint("tinypy"), results, arrived)

    def fail(control: int) -> None:
        raise OSError("no process to be had")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(process, "_start", fail)
            process.submit(CompileRequest(1, "regex", "a"))
            with arrived:
                assert arrived.wait_for(lambda: 1 in results, 60)
        assert results[1].is_our_fault
        assert results[1].error == "the grammar compiler failed; the server's log says why"
        assert "no process to be had" in caplog.text
        with pytest.raises(UnicodeEncodeError):
            process.submit(CompileRequest(2, "regex", "\ud800"))
        process.submit(CompileRequest(3, "regex", "a"))
        with arrived:
            assert arrived.wait_for(lambda: 3 in results, 60)
        assert results[3].error is None
        assert results.keys() == {1, 3}
    finally:
        process.shutdown()
