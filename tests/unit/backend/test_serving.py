"""The life of a request, with an engine that the test drives."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from quire_backend import serving as serving_module
from quire_backend.cancellation import POLL_INTERVAL_SECONDS
from quire_backend.serving import Serving
from quire_engine.config import FrontendConfig
from quire_engine.encoders.video import Video
from quire_engine.errors import EngineDeadError, RequestError
from quire_engine.frontend.chat_template import Conversation
from quire_engine.frontend.default_sampling_params import DefaultSamplingParams
from quire_engine.stats import FinishedRequestStats
from support.serving import wait_until


def emit_hello(engine, request_id):
    engine.emit(request_id, "He")
    engine.emit(request_id, "l")
    engine.emit(request_id, "lo", finish_reason="stop")


def error_of(request):
    last = request.sender.wait()[-1]
    assert last.error is not None
    return last.error.code, last.error.message


def test_answer_without_streaming_is_one_response(engine: Any, serve: Any, request_of: Any) -> None:
    engine.on_add = emit_hello
    request = request_of(text_input="Hi", return_num_output_tokens=True, return_finish_reason=True)
    serve().submit(request)
    (response,) = request.sender.wait()
    assert response.text == "HiHello"
    assert response.tensors["num_output_tokens"].tolist() == [5]
    assert response.tensors["finish_reason"].tolist() == [b"stop"]


def test_stream_ends_with_the_flag_on_its_last_response(engine: Any, serve: Any, request_of: Any) -> None:
    engine.on_add = emit_hello
    request = request_of(text_input="Hi", stream=True)
    serve().submit(request)
    responses = request.sender.wait()
    assert "".join(response.text for response in responses) == "Hello"
    assert request.sender.finals == [False] * (len(responses) - 1) + [True]


def test_what_a_request_leaves_out_is_the_models_default(engine: Any, serve: Any, request_of: Any) -> None:
    sampled = []
    process = engine.process
    engine.process = lambda prompt, params, **more: sampled.append(params) or process(prompt, params, **more)
    engine.on_add = emit_hello
    engine.default_sampling_params = DefaultSamplingParams(
        values={"temperature": 0.6, "top_k": 20, "max_tokens": 50}, max_tokens_limit=50
    )
    serving = serve()
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    for request in (
        request_of(text_input="Hi"),
        request_of({"temperature": None, "max_tokens": 90}, text_input="Hi", sampling_parameters={"top_k": "5"}),
        request_of({"temperature": 0}, messages=messages),
    ):
        serving.submit(request)
        assert request.sender.wait()[-1].error is None
    assert [(params.temperature, params.top_k, params.max_tokens) for params in sampled] == [
        (0.6, 20, 16), (0.6, 5, 50), (0.0, 20, 50),
    ]  # fmt: skip


def test_bad_request_ends_alone(engine: Any, serve: Any, request_of: Any) -> None:
    engine.on_add = emit_hello
    serving = serve()
    bad, good = request_of(text_input=""), request_of(text_input="Hi")
    serving.submit(bad)
    serving.submit(good)
    assert error_of(bad) == ("INVALID_ARG", "text_input is empty")
    assert good.sender.wait()[-1].text == "HiHello"


def test_input_ids_keep_their_name_in_errors(serve: Any, request_of: Any) -> None:
    request = request_of(input_ids=[])
    request._tensors["input_ids"] = request._tensors["input_ids"].astype("int32")
    serve().submit(request)
    assert error_of(request) == ("INVALID_ARG", "input_ids is empty")


def test_unknown_lora_is_not_found(serve: Any, request_of: Any) -> None:
    request = request_of({"lora_name": "x"}, text_input="Hi")
    serve().submit(request)
    assert error_of(request)[0] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("settings", "told"), [({}, [304, 2, 6, 3, 2.5]), ({"report_cached_tokens": False}, [None] * 5)]
)
def test_what_others_have_cached_is_told_unless_the_settings_say_no(
    engine: Any, serve: Any, request_of: Any, settings: dict[str, Any], told: list[float | None]
) -> None:
    metrics = FinishedRequestStats(
        "stop", num_prompt_tokens=320, num_cached_tokens=304, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3
    )
    engine.on_add = lambda engine, request_id: engine.emit(request_id, "x", finish_reason="stop", metrics=metrics)
    request = request_of(text_input="Hi", return_perf_metrics=True)
    serve(**settings).submit(request)
    (response,) = request.sender.wait()
    said = json.loads(response.tensors["perf_metrics"][0])
    names = ("num_cached_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_length")
    assert [said[name] for name in names] == told
    assert said["num_prompt_tokens"] == 320


def test_fault_of_ours_is_internal(serve: Any, request_of: Any) -> None:
    request = request_of(text_input="explode")
    serve().submit(request)
    assert error_of(request) == ("INTERNAL", "the backend failed at this request; the server's log has the cause")


@pytest.mark.parametrize(("call", "message"), [("parameters", "parameters: a name or"), ("request_id", "id is not")])
def test_what_is_no_text_is_the_clients_fault(
    serve: Any, request_of: Any, monkeypatch: Any, call: str, message: str
) -> None:
    request = request_of(text_input="Hi")
    monkeypatch.setattr(request, call, lambda: b"\xff".decode())
    serve().submit(request)
    code, text = error_of(request)
    assert code == "INVALID_ARG"
    assert text.startswith(message)


def test_error_of_the_engine_reaches_the_client(engine: Any, serve: Any, request_of: Any) -> None:
    engine.on_add = lambda engine, request_id: engine.emit(request_id, finish_reason="error", error="it broke")
    request = request_of(text_input="Hi")
    serve().submit(request)
    assert error_of(request) == ("INTERNAL", "it broke")


def test_engine_that_dies_between_check_and_add(engine: Any, serve: Any, request_of: Any) -> None:
    def die(engine, request_id):
        raise EngineDeadError("the engine process died")

    engine.on_add = die
    request = request_of(text_input="Hi")
    serve().submit(request)
    assert error_of(request) == ("UNAVAILABLE", "the engine process died")


def test_dead_engine_takes_no_requests(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve()
    assert serving.is_ready
    engine.is_healthy, engine.dead_error = False, "the engine process died"
    assert not serving.is_ready
    request = request_of(text_input="Hi")
    serving.submit(request)
    assert error_of(request) == ("UNAVAILABLE", "the engine is not running: the engine process died")
    assert "add" not in engine.events


def test_request_without_a_way_back_disturbs_nobody(serve: Any, request_of: Any) -> None:
    request = request_of(text_input="Hi")
    request.get_response_sender = lambda: 1 / 0
    serve().submit(request)


def test_cancelled_request_is_aborted_and_told_so(engine: Any, serve: Any, request_of: Any) -> None:
    request = request_of(text_input="Hi", stream=True)
    serve().submit(request)
    engine.wait_for("add")
    request.sender.cancelled = True
    assert error_of(request)[0] == "CANCELLED"
    assert engine.events.count("abort") == 1


def test_client_that_is_gone_at_once_is_aborted_after_it_was_added(engine: Any, serve: Any, request_of: Any) -> None:
    request = request_of(text_input="Hi")
    request.sender.cancelled = True
    serve().submit(request)
    assert error_of(request)[0] == "CANCELLED"
    assert engine.events == ["start", "add", "abort"]


def test_failed_send_aborts_the_request(engine: Any, serve: Any, request_of: Any) -> None:
    request = request_of(text_input="Hi", stream=True)
    request.sender.fail_after = 1
    serve(stream_interval_ms=0).submit(request)
    engine.wait_for("add")
    (request_id,) = engine.sinks
    engine.emit(request_id, "a")
    request.sender.wait(lambda: len(request.sender.responses) == 1)
    engine.emit(request_id, "b")
    engine.wait_for("abort")
    assert error_of(request)[0] in ("INTERNAL", "CANCELLED")


def test_nothing_is_asked_or_sent_after_the_last_response(engine: Any, serve: Any, request_of: Any) -> None:
    engine.on_add = emit_hello
    serving = serve()
    requests = [request_of(text_input="Hi", stream=True) for _ in range(20)]
    for request in requests:
        serving.submit(request)
    for request in requests:
        request.sender.wait()
    wait_until(lambda: not serving._live and not serving._poller._streams, "nothing is left of them")
    threading.Event().wait(3 * POLL_INTERVAL_SECONDS)
    assert not any(request.sender.misused for request in requests)


def test_shutdown_tells_live_clients_and_ends_everything(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve()
    live = request_of(text_input="Hi", stream=True)
    serving.submit(live)
    engine.wait_for("add")
    serving.shutdown()
    assert error_of(live)[0] == "UNAVAILABLE"
    assert engine.events[-2:] == ["abort", "shutdown"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-")]


def test_draining_refuses_new_requests(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve()
    serving.is_draining = True
    request = request_of(text_input="Hi")
    serving.submit(request)
    code, message = error_of(request)
    assert code == "UNAVAILABLE"
    assert "unloaded" in message
    assert not serving.is_ready


@pytest.mark.parametrize("stream", [True, False])
def test_many_requests_at_once(engine: Any, serve: Any, request_of: Any, stream: Any) -> None:
    engine.on_add = emit_hello
    serving = serve()
    requests = [request_of(text_input="Hi", stream=stream, exclude_input_in_output=True) for _ in range(200)]
    for request in requests:
        serving.submit(request)
    assert {"".join(response.text for response in request.sender.wait()) for request in requests} == {"Hello"}


def test_what_was_refused_is_told_with_its_class_unless_it_was_the_callers_fault(engine: Any, request_of: Any) -> None:
    from quire_backend.serving import Serving
    from quire_engine.config import FrontendConfig

    rejected: list[FinishedRequestStats] = []
    serving = Serving(engine, FrontendConfig(), rejected.append)
    serving.start()

    def refuse(request: Any) -> None:
        serving.submit(request)
        assert error_of(request)

    refuse(request_of({"slo_class": "batch"}, text_input=""))
    refuse(request_of({"lora_name": "x"}, text_input="Hi"))
    refuse(request_of({"slo_class": "batch"}, text_input="explode"))

    def die(engine: Any, request_id: str) -> None:
        raise EngineDeadError("the engine process died")

    engine.on_add = die
    refuse(request_of({"slo_class": "batch"}, text_input="Hi"))
    engine.dead_error = "the engine process died"
    refuse(request_of(text_input="Hi"))
    serving.is_draining = True
    refuse(request_of({"slo_class": "batch"}, text_input="Hi"))
    serving.shutdown()
    assert [one.options.slo.slo_class for one in rejected] == ["batch", "default", "batch", "batch", "default", "batch"]
    assert [one.slo_verdict for one in rejected] == [None, None, *["miss"] * 4]
    assert "text_input is empty" in (rejected[0].error or "")
    assert [one.error_code for one in rejected] == ["invalid_arg", "not_found", "internal", *["unavailable"] * 3]
    assert {(one.finish_reason, one.options.label, one.options.traceparent) for one in rejected} == {
        ("rejected", "label", None)
    }
    assert all(0 < one.e2e_seconds < 60 for one in rejected)


def test_what_was_refused_belongs_to_its_callers_trace(engine: Any, request_of: Any) -> None:
    from quire_backend.serving import Serving
    from quire_engine.config import FrontendConfig

    rejected: list[FinishedRequestStats] = []
    serving = Serving(engine, FrontendConfig(otlp_endpoint="http://127.0.0.1:9"), rejected.append)
    serving.start()
    of_server = request_of(text_input="")
    of_server.trace = lambda: SimpleNamespace(get_context=lambda: '{"traceparent": "the server\'s"}')
    engine.dead_error = "the engine process died"
    for request in (
        request_of({"traceparent": "the caller's"}, text_input="Hi"),
        request_of({"traceparent": "the caller's", "unknown": 1}, text_input="Hi"),  # not even readable
        request_of({"traceparent": 7}, text_input="Hi"),
        of_server,
        request_of(sampling_parameters={"traceparent": "the caller's"}, text_input="Hi"),
        request_of({"unknown": 1}, messages=MESSAGES),
        request_of(messages="[not JSON"),
    ):
        serving.submit(request)
        assert error_of(request)
    serving.shutdown()
    assert [one.options.traceparent for one in rejected] == ["the caller's"] * 2 + [
        None,
        "the server's",
        "the caller's",
        None,
        None,
    ]
    assert [one.options.operation for one in rejected] == ["text_completion"] * 5 + ["chat"] * 2


def test_a_client_hears_of_the_end_when_it_is_counted(engine: Any, request_of: Any) -> None:
    """And before that, of all else."""
    waiting: list[Callable[[], None]] = []
    rejections: list[FinishedRequestStats] = []
    asked = threading.Semaphore(0)

    def when_counted(callback: Callable[[], None]) -> None:
        waiting.append(callback)
        asked.release()

    serving = Serving(engine, FrontendConfig(), on_rejected=rejections.append, when_counted=when_counted)
    serving.start()
    streamed, failed, refused = request_of(text_input="Hi", stream=True), request_of(text_input="Hi"), request_of()
    for number, request in enumerate((streamed, failed), start=1):
        serving.submit(request)
        with engine.changed:
            assert engine.changed.wait_for(lambda number=number: len(engine.sinks) == number, timeout=60)
    first, second = engine.sinks
    engine.emit(first, "He")
    assert streamed.sender.wait(lambda: bool(streamed.sender.responses))[0].text == "He"
    engine.emit(first, "llo", finish_reason="stop")
    engine.emit(second, finish_reason="error", error="by design")
    serving.submit(refused)
    for _ in range(3):
        assert asked.acquire(timeout=60)
    assert len(rejections) == 1
    assert not any(request.sender.finished for request in (streamed, failed, refused))
    for callback in waiting:
        callback()
    assert streamed.sender.wait()[-1].text == "llo"
    assert error_of(failed)[1] == "by design"
    assert error_of(refused)[0] == "INVALID_ARG"
    serving.shutdown()


def test_a_server_that_takes_no_metrics_delays_the_end_of_a_request_and_holds_none_up(
    engine: Any, request_of: Any, monkeypatch: Any, caplog: Any
) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(serving_module, "COUNTING_TIMEOUT_SECONDS", 0.05)
    engine.on_add = emit_hello
    serving = Serving(engine, FrontendConfig(), when_counted=waiting.append)
    serving.start()

    def answered(**inputs: Any) -> Any:
        request = request_of(**inputs)
        serving.submit(request)
        return request.sender.wait()[-1]

    assert answered(text_input="Hi").text == "HiHello"
    num_waiting = len(waiting)
    assert answered(text_input="Hi").text == "HiHello"
    assert answered(text_input="").error.code == "INVALID_ARG"
    assert len(waiting) == num_waiting, "ends pile up while nothing is counted"
    for callback in waiting:
        callback()
    waiting.clear()
    request = request_of(text_input="Hi")
    monkeypatch.setattr(serving_module, "COUNTING_TIMEOUT_SECONDS", 600.0)
    serving.submit(request)
    wait_until(lambda: bool(waiting), "it is to be counted again")
    assert not request.sender.finished
    waiting.pop()()
    assert len(request.sender.wait()) == 1
    serving.shutdown()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "the server has taken no metrics for 0.05 s: until it does, requests end before they are counted"
    ]


# -- conversations ----------------------------------------------------------------------------------------------------

MESSAGES = json.dumps([{"role": "user", "content": "Hi"}])


def test_a_conversation_is_rendered_and_holds_nobody_else_up(engine: Any, serve: Any, request_of: Any) -> None:
    engine.on_add = emit_hello
    may_render = threading.Event()

    def apply_chat_template(conversation: Conversation) -> list[int]:
        assert may_render.wait(60)
        return [ord(character) for character in conversation.messages[0]["content"]]

    engine.apply_chat_template = apply_chat_template
    serving = serve()
    chat, plain = request_of(messages=MESSAGES), request_of(text_input="Hi", exclude_input_in_output=True)
    serving.submit(chat)
    serving.submit(plain)
    assert plain.sender.wait()[-1].text == "Hello"
    assert not chat.sender.finished
    may_render.set()
    assert chat.sender.wait()[-1].text == "Hello"


def test_a_conversation_that_cannot_be_rendered_is_the_clients_fault(engine: Any, serve: Any, request_of: Any) -> None:
    def apply_chat_template(conversation: Conversation) -> list[int]:
        if conversation.messages:
            return []
        raise RequestError("messages", "messages is empty")

    engine.apply_chat_template = apply_chat_template
    serving = serve()
    for messages in (MESSAGES, "[]"):  # one that renders to nothing has the engine's message, by its own name
        request = request_of(messages=messages)
        serving.submit(request)
        assert error_of(request) == ("INVALID_ARG", "messages is empty")


@pytest.mark.parametrize("others", [0, 1])
def test_a_client_that_leaves_while_it_is_rendered_is_aborted(
    engine: Any, serve: Any, request_of: Any, others: int
) -> None:
    """Whether its own conversation is being rendered, or waits for another's."""
    renders, may_render = threading.Semaphore(0), threading.Event()

    def apply_chat_template(conversation: Conversation) -> list[int]:
        renders.release()
        assert may_render.wait(60)
        return [1]

    engine.apply_chat_template = apply_chat_template
    serving = serve()
    for _ in range(others):
        serving.submit(request_of(messages=MESSAGES))
    request = request_of(messages=MESSAGES)
    serving.submit(request)
    assert renders.acquire(timeout=60)
    request.sender.cancelled = True
    wait_until(lambda: any(stream.cancelled for stream in serving._live), "it is known to have left")
    may_render.set()
    assert error_of(request) == ("CANCELLED", "the request was cancelled")


def test_conversations_that_wait_are_answered_when_the_model_is_unloaded(
    engine: Any, serve: Any, request_of: Any
) -> None:
    renders, may_render = threading.Semaphore(0), threading.Event()

    def apply_chat_template(conversation: Conversation) -> list[int]:
        renders.release()
        assert may_render.wait(60)
        return [1]

    engine.apply_chat_template = apply_chat_template
    serving = serve()
    requests = [request_of(messages=MESSAGES) for _ in range(3)]
    for request in requests:
        serving.submit(request)
    assert renders.acquire(timeout=60)
    ending = threading.Thread(target=serving.end_engine)
    ending.start()
    wait_until(lambda: not serving.is_ready, "it drains")
    may_render.set()
    ending.join()
    assert [error_of(request)[0] for request in requests] == ["UNAVAILABLE"] * 3
    assert not renders.acquire(blocking=False)


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""

    __module__ = "pyo3_runtime"


def panic(*args: Any, **options: Any) -> Any:
    raise Panic("by design, in /some/path.rs")


CHAT = json.dumps([{"role": "user", "content": "Hi"}])
LONG_CHAT = json.dumps([{"role": "user", "content": "Hi"}, {"role": "user", "content": "x" * 100_000}])
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "while it is read": ("request.inputs", {"text_input": "Hi"}),
    "where its parameters are": ("request.parameters", {"text_input": "Hi"}),
    "while it is tokenized": ("process", {"text_input": "Hi"}),
    "while a long one is tokenized": ("process", {"text_input": "x" * 100_000}),
    "while it is rendered": ("apply_chat_template", {"messages": CHAT}),
    "while a long one is rendered": ("apply_chat_template", {"messages": LONG_CHAT}),
    "after it was rendered": ("process", {"messages": CHAT}),
    "while it is added": ("add_request", {"text_input": "Hi"}),
    "as tokens are asked for": ("tokenize", {"text_input": "Hi", "task": "tokenize"}),
    "as a snapshot is asked for": ("snapshot", {"text_input": "Hi", "introspect": "snapshot"}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_panic_is_a_line_for_its_client_and_leaves_nothing(
    engine: Any, serve: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    name, said = PLACES[place]
    told = {key: said.pop(key) for key in ("task", "introspect") if key in (said := dict(said))}
    if "introspect" in told:
        told["introspection_token"] = "a" * 16
    serving = serve(introspection_token="a" * 16)
    request = request_of(told, **said)
    if name.startswith("request."):
        setattr(request, name.removeprefix("request."), panic)
    else:
        monkeypatch.setattr(engine, name, panic, raising=False)
    serving.submit(request)
    code, message = error_of(request)
    assert (code, message) == ("INTERNAL", "the backend failed at this request; the server's log has the cause")
    wait_until(lambda: not serving._live, "it is in flight no more")
    monkeypatch.undo()
    engine.on_add = emit_hello
    after = request_of(text_input="Hi")
    serving.submit(after)
    assert after.sender.wait()[-1].text == "HiHello"


@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_a_panic_over_an_output_ends_its_request_alone(
    engine: Any, serve: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch, finish_reason: str | None
) -> None:
    serving = serve()
    request = request_of(text_input="Hi", stream=True)
    serving.submit(request)
    engine.wait_for("add")
    monkeypatch.setattr(serving_module, "failure_of", panic)
    monkeypatch.setattr(serving._responses, "put", panic)
    (request_id,) = engine.sinks
    serving.call(engine.emit, request_id, "a", finish_reason)
    assert error_of(request)[0] == "INTERNAL"
    monkeypatch.undo()
    wait_until(lambda: not serving._live, "it is in flight no more")


@pytest.mark.parametrize("place", ["on_rejected", "when_counted"])
def test_a_panic_in_the_books_does_not_keep_the_answer_back(engine: Any, request_of: Any, place: str) -> None:
    serving = Serving(engine, FrontendConfig(), **{place: panic})
    serving.start()
    bad = request_of(text_input="")
    serving.submit(bad)
    assert error_of(bad) == ("INVALID_ARG", "text_input is empty")
    serving.shutdown()
    assert not serving._live


def test_a_panic_of_the_ending_engine_does_not_keep_the_rest(engine: Any, serve: Any, request_of: Any) -> None:
    engine.shutdown = panic
    serving = serve()
    serving.shutdown()
    assert not serving._loop_thread.is_alive()


def test_a_panic_while_a_client_is_looked_after_leaves_the_others(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve()
    odd, other = request_of(text_input="Hi", stream=True), request_of(text_input="Hi", stream=True)
    odd.sender.is_cancelled = panic
    for request in (odd, other):
        serving.submit(request)
    other.sender.cancelled = True
    assert error_of(other)[0] == "CANCELLED"


def test_an_answer_that_is_cancelled_ends_as_cancelled_and_reaches_its_client(
    engine: Any, serve: Any, request_of: Any
) -> None:
    asked, tasks = threading.Event(), []

    async def snapshot(labels: Any) -> Any:
        tasks.append(asyncio.current_task())
        asked.set()
        await asyncio.Event().wait()

    engine.snapshot = snapshot
    serving = serve(introspection_token="a" * 16)
    request = request_of({"introspect": "snapshot", "introspection_token": "a" * 16}, text_input="Hi")
    serving.submit(request)
    assert asked.wait(60)
    serving.call(tasks[0].cancel)
    assert error_of(request) == ("UNAVAILABLE", "the model is being unloaded")
    wait_until(tasks[0].done, "the task has ended")
    assert tasks[0].cancelled(), "it swallows the cancellation"


def test_short_chats_do_not_wait_for_long_ones(engine: Any, serve: Any, request_of: Any) -> None:
    """Nor does what needs no template."""
    gate = threading.Event()
    render = engine.apply_chat_template

    def slow(conversation):
        if len(conversation.messages) > 1:
            assert gate.wait(60)
        return render(conversation)

    engine.apply_chat_template = slow
    engine.on_add = emit_hello
    serving = serve()
    long = [request_of(messages=LONG_CHAT) for _ in range(8)]
    for request in long:
        serving.submit(request)
    short = [request_of(messages=CHAT), request_of(text_input="Hi"), request_of({"task": "tokenize"}, messages=CHAT)]
    for request in short:
        serving.submit(request)
    for request in short:
        assert request.sender.wait()[-1].error is None
    assert not any(request.sender.finished for request in long)
    gate.set()
    for request in long:
        assert request.sender.wait()[-1].text == "Hello"


def test_more_log_probabilities_than_an_answer_can_hold_are_rejected(
    engine: Any, serve: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_backend.serving.MAX_RESPONSE_BYTES", 1 << 19)
    serving = serve()
    said: dict[str, Any] = {"text_input": "Hi", "return_logprobs": True}
    request = request_of({"n": 8, "logprobs": 20, "max_tokens": 100}, **said)
    serving.submit(request)
    code, message = error_of(request)
    assert code == "INVALID_ARG"
    assert message.startswith("logprobs asks for 10752 of them in all")
    assert "exceeds the 524288 of an answer" in message
    engine.on_add = emit_hello
    # The context has 64 tokens, whatever `max_tokens` says.
    fits: list[dict[str, Any]] = [{"n": 1, "logprobs": 20, "max_tokens": 10**6}, {"n": 8, "max_tokens": 100_000}]
    for parameters in fits:
        fine = request_of(parameters, **said)
        serving.submit(fine)
        assert fine.sender.wait()[-1].error is None


# -- images -----------------------------------------------------------------------------------------------------------


def test_images_go_to_the_placeholders_of_a_prompt(engine: Any, serve: Any, request_of: Any) -> None:
    processed: list[Any] = []

    def process(prompt: Any, params: Any, options: Any) -> Any:
        processed.append(prompt)
        raise RequestError("multi_modal_data", "multi_modal_data: image 1 cannot be used")

    def apply_chat_template(conversation: Conversation) -> Any:
        return {"prompt_token_ids": [1], "multi_modal_data": {"image": conversation.images}}

    engine.process, engine.apply_chat_template = process, apply_chat_template
    serving, image = serve(), [base64.b64encode(b"one").decode(), base64.encodebytes(b"two" * 99).decode()]
    image.append("data:video/jpeg;fps=4;base64,YQ==,Yg==")
    messages = json.dumps([{"role": "user", "content": [{"type": "image"}] * 2 + [{"type": "video"}]}])
    data = {"multi_modal_data": {"image": [b"one", b"two" * 99, Video([b"a", b"b"], 4.0)]}}
    for said, prompt, name in (
        ({"text_input": "a <image> b"}, {"prompt": "a <image> b", **data}, "image"),
        ({"input_ids": [1, 2]}, {"prompt_token_ids": [1, 2], **data}, "image"),
        ({"messages": messages}, {"prompt_token_ids": [1], **data}, "messages"),
    ):
        request = request_of(image=image, **said)
        serving.submit(request)
        assert error_of(request) == ("INVALID_ARG", f"{name}: image 1 cannot be used")
        assert processed.pop() == prompt


def test_an_image_that_is_no_base64_is_named(serve: Any, request_of: Any) -> None:
    serving = serve()
    for image, reason in ((["a"], "the image is not base64"), (["aGk=", ""], "the image is empty")):
        request = request_of(image=image, text_input="a")
        serving.submit(request)
        code, message = error_of(request)
        assert code == "INVALID_ARG"
        assert message.startswith(f"image: {reason}")
