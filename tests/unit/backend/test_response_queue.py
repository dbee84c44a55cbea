"""When streams are sent, and what is merged."""

import json
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from quire_backend import response_queue, triton_api
from quire_backend.request import ResponseOptions
from quire_backend.response_queue import ResponseQueue, ResponseStream
from quire_backend.triton_api import ErrorCode
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput


def delta(text, finish_reason=None):
    completion = CompletionOutput(text=text, token_ids=[1] * len(text), finish_reason=finish_reason)
    return RequestOutput("r", None, [1], [completion], finished=finish_reason is not None)


@pytest.fixture
def make_queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    queues = []

    def make(stream_interval=1, stream_interval_ms=0.0, max_response_bytes=1 << 20):
        monkeypatch.setattr(response_queue, "MAX_RESPONSE_BYTES", max_response_bytes)
        events = {"broken": [], "closed": [], "sending": []}
        queue = ResponseQueue(
            stream_interval=stream_interval, stream_interval_ms=stream_interval_ms,
            on_broken=events["broken"].append, on_closed=events["closed"].append, on_sending=events["sending"].append,
        )  # fmt: skip
        queue.start()
        queues.append(queue)
        return queue, events

    yield make
    for queue in queues:
        queue.stop()


def make_stream(request_of, stream=True, **options):
    sender = request_of(text_input="Hi").sender
    result = ResponseStream(sender, "label")
    result.options = ResponseOptions(stream=stream, outputs=frozenset({"logprobs"}), logprobs=True, **options)
    return result, sender


def texts(sender):
    return [response.text for response in sender.responses]


def test_first_token_and_end_go_at_once_and_the_rest_is_merged(make_queue: Any, request_of: Any) -> None:
    queue, _ = make_queue(stream_interval_ms=600_000.0)  # longer than any wait of this test
    stream, sender = make_stream(request_of)
    queue.put(stream, delta("a"))
    sender.wait(lambda: len(sender.responses) == 1)
    for text in "bcd":
        queue.put(stream, delta(text))
    queue.put(stream, delta("e", "stop"))
    sender.wait()
    assert texts(sender) == ["a", "bcde"]


def with_logprobs(text, num_logprobs, finish_reason=None):
    output = delta(text, finish_reason)
    output.outputs[0].logprobs = [{i: Logprob(-1.0, i, "x") for i in range(num_logprobs)} for _ in text]
    return output


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("last", [None, "stop"])
def test_an_answer_that_grows_beyond_the_limit_ends_with_an_error(
    make_queue: Any, request_of: Any, streams: bool, last: Any
) -> None:
    """Of what a client does not read, nobody tells us: it waits in the server, whether streamed or not."""
    queue, events = make_queue(max_response_bytes=10_000)
    stream, sender = make_stream(request_of, streams)
    queue.put(stream, with_logprobs("a", 20))
    queue.put(stream, with_logprobs("b" * 10, 20, last))
    queue.put(stream, delta("c", "stop"))
    (*_, response) = sender.wait()
    assert response.error.code == ErrorCode.INVALID_ARG.value
    assert response.error.message.startswith("the answer has grown beyond 10000 bytes; ask for fewer")
    assert events["broken"] == ([stream] if last is None else [])  # what has ended already need not be aborted
    assert stream.pending is None


@pytest.mark.parametrize("streams", [True, False])
def test_log_probabilities_count_as_the_json_that_they_become_and_only_where_they_are_shown(
    make_queue: Any, request_of: Any, streams: bool
) -> None:
    queue, _ = make_queue(max_response_bytes=10_000)
    for shown, fits in ((True, False), (False, True)):
        stream, sender = make_stream(request_of, streams)
        stream.options = replace(stream.options, logprobs=shown)
        queue.put(stream, with_logprobs("a" * 12, 20, "stop"))  # of 45 bytes each
        (response,) = sender.wait()
        assert (response.error is None) is fits


def test_many_small_responses_count_too(make_queue: Any, request_of: Any) -> None:
    queue, events = make_queue(max_response_bytes=10_000)
    stream, sender = make_stream(request_of)
    for number in range(1, 100):
        queue.put(stream, delta("a"))
        sender.wait(lambda number=number: len(sender.responses) == number or sender.finished)
        if sender.finished:
            break
    assert number == 11  # of 1 KiB each
    assert events["broken"] == [stream]


def test_a_pending_delta_goes_when_its_time_has_come(make_queue: Any, request_of: Any) -> None:
    queue, _ = make_queue(stream_interval_ms=50.0)
    stream, sender = make_stream(request_of)
    queue.put(stream, delta("a"))
    sender.wait(lambda: len(sender.responses) == 1)
    queue.put(stream, delta("b"))
    queue.put(stream, delta("c"))
    sender.wait(lambda: "c" in "".join(texts(sender)))
    assert "".join(texts(sender)) == "abc", "without anything that follows"


def test_stream_interval_counts_tokens(make_queue: Any, request_of: Any) -> None:
    queue, _ = make_queue(stream_interval=3)
    stream, sender = make_stream(request_of)
    queue.put(stream, delta("a"))
    sender.wait(lambda: len(sender.responses) == 1)
    queue.put(stream, delta("b"))
    queue.put(stream, delta("c"))
    queue.put(stream, delta("d"))
    sender.wait(lambda: len(sender.responses) == 2)
    queue.put(stream, delta("e", "length"))
    sender.wait()
    assert texts(sender) == ["a", "bcd", "e"]


def test_without_streaming_there_is_one_response(make_queue: Any, request_of: Any) -> None:
    queue, events = make_queue()
    stream, sender = make_stream(request_of, stream=False)
    for text in "abc":
        queue.put(stream, delta(text))
    queue.put(stream, delta("d", "stop"))
    sender.wait()
    assert texts(sender) == ["abcd"]
    assert sender.finals == [True]
    queue.stop()
    assert events["closed"] == [stream]


def test_failure_discards_what_is_pending(make_queue: Any, request_of: Any) -> None:
    queue, _ = make_queue(stream_interval_ms=1000.0)
    stream, sender = make_stream(request_of)
    queue.put(stream, delta("a"))
    sender.wait(lambda: len(sender.responses) == 1)
    queue.put(stream, delta("b"))
    queue.fail(stream, ErrorCode.CANCELLED, "gone")
    queue.fail(stream, ErrorCode.INTERNAL, "too late")
    queue.put(stream, delta("c"))
    sender.wait()
    assert [response.error and response.error.code for response in sender.responses] == [None, "CANCELLED"]


def test_slow_sending_merges_by_itself(make_queue: Any, request_of: Any) -> None:
    queue, _ = make_queue()
    stream, sender = make_stream(request_of)
    gate = threading.Event()
    send = sender.send

    def slow_send(response, flags=0):
        send(response, flags)
        assert gate.wait(60)

    sender.send = slow_send
    queue.put(stream, delta("a"))
    sender.wait(lambda: len(sender.responses) == 1)
    for text in "bcdef":
        queue.put(stream, delta(text))
    gate.set()
    queue.put(stream, delta("g", "stop"))
    sender.wait()
    assert "".join(texts(sender)) == "abcdefg"
    assert len(sender.responses) <= 3


def test_stream_that_cannot_be_sent_breaks_alone(make_queue: Any, request_of: Any) -> None:
    queue, events = make_queue()
    broken, broken_sender = make_stream(request_of)
    other, other_sender = make_stream(request_of)
    broken_sender.fail_after = 0
    queue.put(broken, delta("a"))
    queue.put(other, delta("a", "stop"))
    other_sender.wait()
    assert texts(other_sender) == ["a"]
    queue.put(broken, delta("b", "abort"))
    (response,) = broken_sender.wait()
    assert response.error.code == "INTERNAL"
    assert events["broken"] == [broken]


def test_response_that_cannot_be_made_still_ends_the_request(make_queue: Any, request_of: Any) -> None:
    queue, events = make_queue()
    stream, sender = make_stream(request_of)
    bad = delta("a", "stop")
    bad.outputs[0].text = None
    queue.put(stream, bad)
    (response,) = sender.wait()
    assert response.error.code == "INTERNAL"
    queue.stop()
    assert events["closed"] == [stream]


def test_cancellation_is_not_asked_for_after_the_end(make_queue: Any, request_of: Any) -> None:
    queue, _ = make_queue()
    stream, sender = make_stream(request_of)
    assert stream.check_cancelled() is False
    queue.put(stream, delta("a", "stop"))
    sender.wait()
    sender.cancelled = True
    assert stream.check_cancelled() is False
    assert not sender.misused


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


@pytest.mark.parametrize("final", [True, False])
def test_a_panic_while_a_response_is_built_ends_that_request_alone(
    make_queue: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch, final: bool
) -> None:
    queue, events = make_queue()
    stream, sender = make_stream(request_of)
    other, other_sender = make_stream(request_of)
    build = response_queue.tensors_of

    def panic(output, options):
        if output.outputs[0].text == "panic":
            raise Panic("by design")
        return build(output, options)

    monkeypatch.setattr(response_queue, "tensors_of", panic)
    queue.put(stream, delta("panic", "stop" if final else None))
    if not final:
        assert_soon(lambda: events["broken"] == [stream])
        queue.put(stream, delta("", "abort"))
    assert sender.wait()[-1].error.code == "INTERNAL"
    queue.put(other, delta("a", "stop"))
    assert other_sender.wait()[-1].text == "a"
    queue.stop()
    assert events["closed"] == [stream, other]


def assert_soon(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def large(size, finish_reason=None):
    """A delta whose response has at least so many bytes."""
    output = delta("l", finish_reason)
    output.outputs[0].logprobs = [{7: Logprob(-1.0, 1, "x" * size)}]
    return output


def test_a_large_response_holds_up_no_other_and_is_not_sending(make_queue: Any, request_of: Any) -> None:
    """While it is built and sent, which takes long, other streams go on; the watch of `quire serve` sees no silence."""
    queue, events = make_queue(max_response_bytes=1 << 30)
    stream, sender = make_stream(request_of)
    begun, gate = threading.Event(), threading.Event()
    send = sender.send

    def slow_send(response=None, flags=0):
        begun.set()
        assert gate.wait(60)
        send(response, flags)

    sender.send = slow_send
    queue.put(stream, large(2 << 20))
    assert begun.wait(60)
    queue.put(stream, delta("m"))
    queue.put(stream, large(2 << 20, "stop"))
    other, other_sender = make_stream(request_of)
    queue.put(other, delta("a", "stop"))
    assert other_sender.wait()[-1].text == "a"
    assert_soon(lambda: events["sending"] == [1, 0])  # the other's
    gate.set()
    sender.wait()
    assert_soon(lambda: len(events["closed"]) == 2)
    queue.put(stream, delta("n"))
    queue.stop()
    assert texts(sender) == ["l", "ml"], "in order, and each once"
    assert events["closed"] == [other, stream]
    assert not sender.misused


def test_log_probabilities_wait_as_text_that_is_ready(make_queue: Any, request_of: Any) -> None:
    """A million objects would be walked by the garbage collector, and in the end be turned into text all at once."""
    queue, _ = make_queue()
    stream, sender = make_stream(request_of, stream=False)
    for _ in range(3):
        queue.put(stream, with_logprobs("ab", 2))
    positions = stream.pending.outputs[0].logprobs
    assert [bytes(position) for position in positions] == [
        b'{"0":{"logprob":-1.0,"rank":0,"decoded_token":"x"},"1":{"logprob":-1.0,"rank":1,"decoded_token":"x"}}'
    ] * 6
    queue.put(stream, delta("", "stop"))
    (response,) = sender.wait()
    assert response.tensors["logprobs"].tolist() == [b"[" + b",".join(map(bytes, positions)) + b"]"]


class StubsSender:
    """As the stub's: once the final flag was given, it takes nothing more, whether or not that send has failed."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[tuple[Any, int]] = []
        self._closed = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self._closed, "Unable to send response. Response sender has been closed."
        self._closed = flags == 1
        if response is not None and sum(sys.getsizeof(x) for t in response.tensors.values() for x in t) > self.room:
            raise RuntimeError("Failed to increase the shared memory pool size")
        self.taken.append((response, flags))


@pytest.mark.parametrize("size", [100, 2 << 20], ids=["small", "large"])
def test_a_last_response_that_finds_no_room_ends_with_an_error(
    make_queue: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(triton_api.os, "statvfs", lambda path: full)
    queue, events = make_queue(max_response_bytes=1 << 30)
    for room, fails in ((1 << 30, False), (50, True)):
        sender = StubsSender(room)
        stream = ResponseStream(sender, "label")
        stream.options = ResponseOptions(outputs=frozenset({"logprobs"}), logprobs=True)
        queue.put(stream, large(size, "stop"))
        assert_soon(lambda stream=stream: stream in events["closed"])
        (response, flags), last = sender.taken
        assert last == (None, 1), "the flag alone"
        assert flags == 0
        assert (response.error is not None) is fails
        if fails:
            assert response.error.code == "INTERNAL"
            assert "could not be sent" in response.error.message


def test_a_large_last_response_that_fails_although_room_was_seen_ends_with_an_error(make_queue: Any) -> None:
    """Others take the room between the look and the copy, which takes longer the larger it is."""
    queue, events = make_queue(max_response_bytes=1 << 30)
    sender = StubsSender(50)
    stream = ResponseStream(sender, "label")
    stream.options = ResponseOptions(outputs=frozenset({"logprobs"}), logprobs=True)
    queue.put(stream, large(2 << 20, "stop"))
    assert_soon(lambda: events["closed"])
    (response, flags), last = sender.taken
    assert (response.error.code, flags, last) == ("INTERNAL", 0, (None, 1))


def test_the_prompts_log_probabilities_are_built_where_they_hold_up_no_other(make_queue: Any, request_of: Any) -> None:
    """A long prompt has half a million: not in the thread that puts them, which is the event loop's, but beside all."""
    queue, _ = make_queue(max_response_bytes=1 << 30)
    stream, sender = make_stream(request_of, stream=False)
    stream.options = ResponseOptions(outputs=frozenset({"prompt_logprobs"}))
    built_in = set()

    class Positions(list):
        def __iter__(self):
            built_in.add(threading.current_thread().name)
            return super().__iter__()

    output = delta("a", "stop")
    output.prompt_logprobs = Positions([None, *[{i: Logprob(float("nan"), 1, "x") for i in range(21)}] * 1000])
    queue.put(stream, output)
    (response,) = sender.wait()
    assert built_in == {"quire-large"}
    said = json.loads(response.tensors["prompt_logprobs"][0])
    assert (len(said), said[0], said[1]["20"]["logprob"]) == (1001, None, -9999.0)


def test_the_prompts_log_probabilities_count_before_they_are_built(make_queue: Any, request_of: Any) -> None:
    queue, _ = make_queue(max_response_bytes=100_000)
    stream, sender = make_stream(request_of, stream=False)
    stream.options = ResponseOptions(outputs=frozenset({"prompt_logprobs"}))
    output = delta("a", "stop")
    output.prompt_logprobs = [None, *[{i: Logprob(-1.0, 1, "x") for i in range(21)}] * 100]
    queue.put(stream, output)
    assert "beyond 100000 bytes" in sender.wait()[-1].error.message


def test_while_there_is_room_the_flag_rides_on_the_last_response(make_queue: Any) -> None:
    queue, events = make_queue(max_response_bytes=1 << 30)
    sender = StubsSender(1 << 30)
    stream = ResponseStream(sender, "label")
    queue.put(stream, delta("a", "stop"))
    assert_soon(lambda: events["closed"])
    assert [flags for _, flags in sender.taken] == [1]
