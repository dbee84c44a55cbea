"""The processes that decode and encode images: killed, shared by threads, slow, and ended with the engine."""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from quire_engine.encoders.family import find_family
from quire_engine.encoders.image_encoder import EncodedImage, ImageEncoder
from quire_engine.encoders.processing import Job
from quire_engine.errors import EngineDeadError, EngineUnavailableError, RequestError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.system.limited_process import LimitedProcess
from support.engines import Stream, engine, params, run, until
from support.pictures import image_of
from support.processes import eventually, is_gone, state

SETTINGS: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**22}


@pytest.fixture(scope="module")
def folder(picture_checkpoint: Callable[[str], Path]) -> Path:
    return picture_checkpoint("smolvlm")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[ImageEncoder]:
    family = find_family(folder)
    assert family is not None
    encoder = ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", max_images=4)
    yield encoder
    processes = [one._process for one in (encoder._tower, encoder._processing)]
    encoder.shutdown()
    assert all(process is not None and is_gone(process.pid) for process in processes)


@pytest.fixture(scope="module")
def expected(encoder: ImageEncoder) -> EncodedImage:
    found = encoder.encode(image_of(28, 28))
    encoder._cache.clear()
    return found


def pid_of(process: LimitedProcess, other_than: int = 0) -> int:
    """The process's id, once it has one."""
    assert eventually(lambda: process._process is not None and process._process.pid != other_than)
    assert process._process is not None
    return process._process.pid


@contextlib.contextmanager
def stopped_in_a_job(process: LimitedProcess, encode: Callable[[], Any]) -> Iterator[tuple[int, Any]]:
    """Its id, and the future of an image that it has been given: it does not go on."""
    pid = pid_of(process)
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: state(pid) == "T"), "until then it may still read the job"
    assert process._process is not None
    assert process._process.stdin is not None
    pipe = process._process.stdin.fileno()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(encode)
        try:
            assert eventually(lambda: any(fcntl.ioctl(pipe, termios.FIONREAD, struct.pack("i", 0))))
            yield pid, future
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["_processing", "_tower"])
def test_one_that_is_killed_is_started_again_and_of_two_the_image_may_be_sent_again(
    name: str, encoder: ImageEncoder, expected: EncodedImage, caplog: pytest.LogCaptureFixture
) -> None:
    process, encode = getattr(encoder, name), partial(encoder.encode, image_of(28, 28))
    with stopped_in_a_job(process, encode) as (pid, future):
        os.kill(pid, signal.SIGKILL)
        assert future.result(60) == expected
    assert not caplog.messages, "the request went on"
    encoder._cache.clear()
    encoder.take_stats()
    with stopped_in_a_job(process, encode) as (pid, future):
        os.kill(pid, signal.SIGKILL)
        os.kill(pid_of(process, other_than=pid), signal.SIGKILL)
        with pytest.raises(EngineUnavailableError, match="has died"):
            future.result(60)
    assert [message.partition(":")[0] for message in caplog.messages] == ["an image could not be encoded"]
    assert encode() == expected
    stats = encoder.take_stats()
    assert stats is not None
    assert (stats.num_failed, stats.num_cached, len(stats.encode_seconds)) == (1, 0, 1)
    encoder._cache.clear()


def test_threads_share_what_is_encoded(encoder: ImageEncoder, expected: EncodedImage) -> None:
    images = [image_of(28, 28), image_of(28, 40, seed=1)] * 4
    encoder.take_stats()
    barrier = threading.Barrier(len(images))

    def encode(image: Any) -> EncodedImage:
        barrier.wait(60)
        return encoder.encode(image)

    with ThreadPoolExecutor(len(images)) as threads:
        found = list(threads.map(encode, images))
    assert found[0] == expected
    assert all(one is found[number % 2] for number, one in enumerate(found))
    stats = encoder.take_stats()
    assert stats is not None
    assert (stats.num_cached, len(stats.encode_seconds), stats.num_failed) == (6, 2, 0)
    assert encoder.take_stats() is None
    with stopped_in_a_job(encoder._tower, partial(encoder.encode, image_of(30, 30, seed=3))) as (_, future):
        assert encoder.encode(images[0]) is found[0], "one that is cached does not wait for another"
        assert not future.done()
    encoder._cache.clear()


def test_images_are_decoded_beside_the_tower_and_those_of_one_prompt_do_not_go_before_others(
    encoder: ImageEncoder, expected: EncodedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    done: list[str] = []
    submit, ask = encoder._threads.submit, encoder._ask

    def record_submit(function: Any, content: bytes, job: Job, digest: bytes) -> Any:
        assert job.size is not None
        widths.append(job.size[0])
        return submit(function, content, job, digest)

    def record_ask(process: LimitedProcess, job: Any, what: str) -> Any:
        answer = ask(process, job, what)
        done.append(what)
        return answer

    monkeypatch.setattr(encoder._threads, "submit", record_submit)
    monkeypatch.setattr(encoder, "_ask", record_ask)
    place = encoder._family.placeholder_id
    many = [image_of(30 + number, 28) for number in range(4)]
    with ThreadPoolExecutor(2) as threads:
        with stopped_in_a_job(encoder._tower, partial(encoder.insert, [5, *[place] * 4], many)) as (_, first):
            assert eventually(lambda: done == ["decodes"] * 2), "one beside the tower"
            other = threads.submit(encoder.insert, [5, place], [image_of(60, 28)])
            assert eventually(lambda: len(encoder._pending) == 3)
        together, alone = first.result(60), other.result(60)
    assert widths == [30, 31, 60, 32, 33]
    assert done.count("encodes") == 5
    assert [part.digest for part in together[1]] == [
        part.digest for image in many for part in encoder.encode(image).parts
    ]
    assert alone[1][0].digest == encoder.encode(image_of(60, 28)).parts[0].digest
    assert encoder._pending == {}
    encoder._cache.clear()


def test_both_start_before_the_first_image_and_end_while_they_load(folder: Path) -> None:
    family = find_family(folder)
    assert family is not None
    encoder = ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", max_images=1)
    pids = [pid_of(process) for process in (encoder._processing, encoder._tower)]
    encoder.shutdown()
    assert all(map(is_gone, pids))
    with pytest.raises(EngineDeadError, match="shut down"):
        encoder.encode(image_of(28, 28))


def prompt_with(image: Any) -> Any:
    return {"prompt": "a <image> b", "multi_modal_data": {"image": image}}


def test_streams_go_on_while_an_image_is_encoded_and_a_client_may_leave(folder: Path) -> None:
    shm = set(os.listdir("/dev/shm"))

    async def main() -> None:
        images = llm.input_processor.images
        assert images is not None
        first = await Stream(llm, prompt_with(image_of(28, 28)), params(max_tokens=3)).task
        assert first.metrics is not None
        assert [phase for phase, _ in first.metrics.phases] == ["encode", "queue", "prefill", "decode"]
        pid = pid_of(images._tower)
        os.kill(pid, signal.SIGSTOP)
        try:
            slow, left = (
                Stream(llm, prompt_with(image_of(28, 28, seed=seed)), params(max_tokens=3)) for seed in (1, 2)
            )
            text = await asyncio.gather(*(Stream(llm, [2, 3 + i], params(max_tokens=20)).task for i in range(3)))
            assert all(output.finished for output in text)
            assert not slow.task.done()
            left.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left.task
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await slow.task).outputs[0].token_ids
        again = await Stream(llm, prompt_with([image_of(28, 28)]), params(max_tokens=3)).task
        assert again.outputs == first.outputs
        assert not llm._output_processor.has_requests()
        with pytest.raises(RequestError, match=r"multi_modal_data: (an image|image 1) cannot be used"):
            await Stream(llm, prompt_with(b"no picture"), params(max_tokens=3)).task
        await Stream(llm, [2, 3], params(max_tokens=2)).task
        await until(lambda: sum(one.num_failed for one in counted()) == 1)
        assert sum(one.num_cached for one in counted()) == 1
        assert sum(len(one.encode_seconds) for one in counted()) >= 2
        os.kill(pid, signal.SIGSTOP)
        dying = Stream(llm, prompt_with(image_of(28, 28, seed=4)), params(max_tokens=3))
        await until(lambda: images._pending)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await dying.task
        assert is_gone(pid)

    def counted() -> list[Any]:
        return [stats.images for stats in recorder.iterations if stats.images is not None]

    with engine(folder, **SETTINGS) as (llm, recorder):
        run(llm, main)
    assert set(os.listdir("/dev/shm")) <= shm
