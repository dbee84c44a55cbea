"""When streams are sent, and what is merged."""

import threading
from typing import Any

import pytest
from quire_backend.request import ResponseOptions
from quire_backend.response_queue import ResponseQueue, ResponseStream
from quire_backend.triton_api import ErrorCode
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput


def delta(text, finish_reason=None):
    completion = CompletionOutput(text=text, token_ids=[1] * len(text), finish_reason=finish_reason)
    return RequestOutput("r", None, [1], [completion], finished=finish_reason is not None)


@pytest.fixture
def make_queue():
    queues = []

    def make(stream_interval=1, stream_interval_ms=0.0, max_response_bytes=1 << 20):
        events = {"broken": [], "closed": []}
        queue = ResponseQueue(
            stream_interval=stream_interval, stream_interval_ms=stream_interval_ms,
            max_response_bytes=max_response_bytes,
            on_broken=events["broken"].append, on_closed=events["closed"].append,
        )  # fmt: skip
        queue.start()
        queues.append(queue)
        return queue, events

    yield make
    for queue in queues:
        queue.stop()


def make_stream(request_of, stream=True):
    sender = request_of(text_input="Hi").sender
    result = ResponseStream(sender, "label")
    result.options = ResponseOptions(stream=stream)
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
    assert response.error.message.startswith("the answer has grown beyond max_response_bytes=10000; ask for fewer")
    assert events["broken"] == ([stream] if last is None else [])  # what has ended already need not be aborted
    assert stream.pending is None


def test_log_probabilities_that_wait_for_the_end_count_as_the_objects_that_they_are(
    make_queue: Any, request_of: Any
) -> None:
    queue, _ = make_queue(max_response_bytes=10_000)
    for streams, fits in ((True, True), (False, False)):
        stream, sender = make_stream(request_of, streams)
        queue.put(stream, with_logprobs("aaaa", 20, "stop"))
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
        assert gate.wait(10)

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
