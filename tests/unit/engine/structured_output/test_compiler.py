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
from collections.abc import Callable, Iterator
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

AS_EVER = pytest.mark.usefixtures("started_as_ever")
"""With what it loads, and the limits that are relative to it. Other compilers are forked: a start takes a second."""
FREE = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


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


SLOW = json.dumps(PATHOLOGICAL["many optional properties"]["json"])


def params(structured_outputs: dict[str, Any], **values: Any) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": 8, "structured_outputs": structured_outputs, **values}
    return SamplingParams.from_mapping(given)


async def collect(llm: AsyncLLM, sampling_params: SamplingParams) -> RequestOutput:
    return [output async for output in llm.generate("x = ", sampling_params)][-1]


def compiler_of(engine_pid: int) -> int:
    """The process id of an engine's grammar compiler."""
    return next(pid for pid in children(engine_pid) if "quire_engine.structured_output.compiler" in command_line(pid))


@AS_EVER
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

    with engine(checkpoint("tinypy"), max_model_len=256, step_seconds=0.01) as (llm, _):
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


class Observed(CompilerProcess):
    """Collects the results itself, and notes which jobs go on to their ends: tests strike then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(CompilerArguments(str(folder), 4096, [1]))
        self.results: dict[int, CompileResult] = {}
        self.begun: queue.Queue[int] = queue.Queue()
        self._arrived = threading.Condition()

    def wait_for(self, *job_ids: int) -> CompileResult:
        """Wait until these have ended; the last one's result."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.results.keys() >= {*job_ids}, 60)
        return self.results[job_ids[-1]]

    def strike(self, signum: int = signal.SIGKILL) -> None:
        assert self.pid is not None
        os.kill(self.pid, signum)

    def _on_start(self) -> None:
        pass

    def _on_ready(self, tokenizer_info: str) -> str | None:
        return None

    def _on_result(self, result: CompileResult) -> None:
        with self._arrived:
            self.results[result.job_id] = result
            self._arrived.notify_all()

    def _send(self, message: bytes, *descriptors: int) -> None:
        super()._send(message, *descriptors)
        if descriptors:
            job_id, cpu_seconds = START.unpack(message)
            if cpu_seconds == math.inf:
                self.begun.put(job_id)


@pytest.fixture
def process(checkpoint: Callable[[str], Path]) -> Iterator[Observed]:
    """A compiler, which starts with the first job."""
    process = Observed(checkpoint("tinypy"))
    yield process
    process.shutdown()


def test_one_bad_grammar_does_not_hold_up_the_others(process: Observed) -> None:
    process.submit(CompileRequest(0, "json", SLOW))
    for i in range(1, 6):
        process.submit(CompileRequest(i, "regex", f"a{{{i}}}"))
    process.wait_for(1, 2, 3, 4, 5)
    assert 0 not in process.results
    assert all(result.error is None for result in process.results.values())
    process.cancel(0)


def test_a_tokenizer_that_does_not_load_is_our_fault(tmp_path: Path) -> None:
    process = Observed(tmp_path)
    try:
        for job_id in (1, 2):  # the second try starts it again
            process.submit(CompileRequest(job_id, "regex", "a"))
            result = process.wait_for(job_id)
            assert result.is_our_fault
            assert "cannot start" in (result.error or "")
    finally:
        process.shutdown()


@pytest.mark.slow
def test_a_grammar_that_ends_the_compiler_is_refused_by_name_and_alone(process: Observed) -> None:
    # Whenever job 1 is begun the process dies, as if that were job 1's doing; job 2 is compiled beside it at first.
    process.submit(CompileRequest(1, "json", SLOW))
    assert process.begun.get(timeout=60) == 1
    process.submit(CompileRequest(2, "json", json.dumps({"type": "integer"})))
    process.strike()
    while 1 not in process.results:
        with contextlib.suppress(queue.Empty):
            if process.begun.get(timeout=0.1) == 1:
                process.strike()
    assert process.results[1].error == "the grammar compiler died 3 times while it compiled this json; simplify it"
    assert not process.results[1].is_our_fault
    assert process.wait_for(2).error is None
    process.shutdown()
    assert process._thread is None or not process._thread.is_alive()


def test_after_a_death_one_grammar_is_compiled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Observed(Path())
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


def test_kills_while_it_starts_fail_nobody(process: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(process, "_on_start", lambda: starts.put(None))
    process.submit(CompileRequest(1, "choice", json.dumps(["a"])))
    for _ in range(3):
        starts.get(timeout=60)
        process.strike()
    assert process.wait_for(1).error is None


def test_one_that_never_starts_is_our_fault(
    process: Observed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process._closing, "wait", lambda seconds: False)
    monkeypatch.setattr(process, "_on_start", process.strike)
    process.submit(CompileRequest(1, "regex", "a"))
    result = process.wait_for(1)
    assert result.error == "the grammar compiler cannot start; the server's log says why"
    assert "cannot start: it was killed by SIGKILL, for the 5th time in a row" in caplog.text
    assert result.is_our_fault


def test_a_stopped_compiler_is_found_and_started_again(
    process: Observed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler_process, "OVERDUE_SECONDS", 1.0)
    process.submit(CompileRequest(1, "regex", "a"))
    process.wait_for(1)
    pid = process.pid
    process.strike(signal.SIGSTOP)
    process.submit(CompileRequest(2, "regex", "b"))
    assert process.wait_for(2).error is None
    assert process.pid != pid
    assert "the grammar compiler was stopped, or hangs" in caplog.text


def test_what_nests_too_deeply_is_said_in_words(process: Observed) -> None:
    process.submit(CompileRequest(1, "json", '{"anyOf":[' * 400 + '{"type":"integer"}' + "]}" * 400))
    result = process.wait_for(1)
    assert result.error == "the json nests too deeply"
    assert not result.is_our_fault


@pytest.mark.parametrize("status", [2 << 8, 127 << 8, signal.SIGSEGV, signal.SIGABRT], ids=str)
def test_a_job_without_memory_says_so(status: int) -> None:
    """127 is the dynamic loader's, where C++ has no memory left to raise an exception."""
    result = _explain(CompileRequest(1, "json", "{}"), os.waitstatus_to_exitcode(status))
    assert "takes too much memory or nests too deeply; simplify it" in (result.error or "")
    assert not result.is_our_fault


def test_a_job_that_takes_too_long_says_so() -> None:
    result = _explain(CompileRequest(1, "json", "{}"), -signal.SIGALRM)
    assert result.error == f"the json takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
    assert not result.is_our_fault


def test_what_proves_slow_is_known(process: Observed) -> None:
    process.submit(CompileRequest(1, "json", SLOW))
    process.submit(CompileRequest(2, "regex", "a"))
    assert process.begun.get(timeout=60) == 1, "in the last round"
    process.wait_for(2)
    assert process.slow_jobs() == [1]
    process.cancel(1)
    assert process.slow_jobs() == []


def test_a_stopped_job_is_begun_again(process: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "OVERDUE_SECONDS", COMPILE_SECONDS)
    process.submit(CompileRequest(1, "json", SLOW))
    assert process.begun.get(timeout=60) == 1
    assert process.pid is not None
    assert eventually(lambda: len(children(process.pid)) == 1)
    (job,) = children(process.pid)
    os.kill(job, signal.SIGSTOP)
    assert process.begun.get(timeout=60) == 1
    assert eventually(lambda: is_gone(job))
    process.cancel(1)


def test_a_job_that_somebody_kills_is_our_fault(process: Observed) -> None:
    process.submit(CompileRequest(1, "json", SLOW))
    assert process.begun.get(timeout=60) == 1
    assert process.pid is not None
    assert eventually(lambda: len(children(process.pid)) == 1)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    result = process.wait_for(1)
    assert "was killed by SIGKILL" in (result.error or "")
    assert result.is_our_fault
    assert not result.cacheable


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
    process: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(LIMITED.format(python=sys.executable))
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    process._arguments.niceness = START_NICENESS
    process.submit(CompileRequest(1, "regex", "a"))
    assert process.wait_for(1).error is None
    assert process.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= START_NICENESS + 3, "else this shows nothing"


def test_it_is_there_before_the_first_grammar_and_again_after_its_death(
    process: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(process, "_on_ready", ready.put)
    process.start()
    for _ in range(2):
        assert ready.get(timeout=60)
        process.strike()
    assert ready.get(timeout=60)
    process.submit(CompileRequest(1, "regex", "a"))
    assert process.wait_for(1).error is None


@AS_EVER
def test_the_compiler_loads_neither_torch_nor_models(process: Observed) -> None:
    process.submit(CompileRequest(1, "json_object", "true"))
    assert process.wait_for(1).error is None
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libxgrammar" in maps
    assert "libtorch" not in maps


def test_a_cancelled_job_makes_room_and_says_nothing(process: Observed) -> None:
    process.submit(CompileRequest(0, "regex", "a"))
    process.wait_for(0)
    for job_id in range(1, 13):  # more than run at once
        process.submit(CompileRequest(job_id, "json", SLOW))
    for job_id in range(1, 13):
        process.cancel(job_id)
    process.submit(CompileRequest(13, "regex", "b"))
    process.wait_for(13)
    assert process.results.keys() == {0, 13}
    assert process.pid is not None
    assert eventually(lambda: all(map(is_gone, children(process.pid))))
    assert process.results.keys() == {0, 13}, "none ended by itself"


def test_a_failure_in_the_readers_thread_fails_what_waits_and_starts_afresh(
    process: Observed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(control: int) -> None:
        raise OSError("no process to be had")

    with monkeypatch.context() as patch:
        patch.setattr(process, "_start", fail)
        process.submit(CompileRequest(1, "regex", "a"))
        result = process.wait_for(1)
    assert result.is_our_fault
    assert result.error == "the grammar compiler failed; the server's log says why"
    assert "no process to be had" in caplog.text
    with pytest.raises(UnicodeEncodeError):
        process.submit(CompileRequest(2, "regex", "\ud800"))
    process.submit(CompileRequest(3, "regex", "a"))
    assert process.wait_for(3).error is None
    assert process.results.keys() == {1, 3}
