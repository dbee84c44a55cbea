"""Operators' requests: who is let in, and what is answered. The engine is a fake."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from quire_backend.introspection import TokenGuard, parse_introspection
from quire_backend.serving import Serving
from quire_backend.settings import load_engine_config
from quire_engine.config import FrontendConfig
from quire_engine.errors import EngineError, EngineSleepingError, OperationError, RequestError, ScalingError
from quire_engine.frontend.default_sampling_params import DefaultSamplingParams
from quire_engine.snapshot import BlocksSnapshot, EngineSnapshot, PrefixTreeSnapshot, RequestSnapshot, Snapshot

TOKEN = "open sesame, now"


def parameters(**values: Any) -> str:
    return json.dumps(values)


@pytest.mark.parametrize("text", ["", "{}", parameters(max_tokens=3), parameters(stop='"introspect"')])
def test_requests_of_clients_are_none_of_these(text: str) -> None:
    assert parse_introspection(text, TokenGuard(TOKEN)) is None
    assert parse_introspection(text, TokenGuard(None)) is None


def test_what_may_be_asked() -> None:
    text = parameters(
        introspect="snapshot", introspection_token=TOKEN, triton_enable_empty_final_response=False, id="x"
    )
    snapshot = parse_introspection(text, TokenGuard(TOKEN))
    assert snapshot is not None
    assert (snapshot.action, snapshot.arguments) == ("snapshot", {})
    cancel = parse_introspection(
        parameters(introspect="cancel", introspection_token=TOKEN, cancel_request_id="r"), TokenGuard(TOKEN)
    )
    assert cancel is not None
    assert (cancel.action, cancel.arguments) == ("cancel", {"cancel_request_id": "r"})
    scale = parse_introspection(
        parameters(introspect="scale", introspection_token=TOKEN, replicas=64), TokenGuard(TOKEN)
    )
    assert scale is not None
    assert (scale.action, scale.arguments) == ("scale", {"replicas": 64})
    sleep = parse_introspection(
        parameters(introspect="sleep", introspection_token=TOKEN, level=2, triton_x=1), TokenGuard(TOKEN)
    )
    assert sleep is not None
    assert (sleep.action, sleep.arguments) == ("sleep", {"level": 2})


@pytest.mark.parametrize(
    ("said", "parameter"),
    [
        ({"introspect": "snapshot"}, "introspection_token"),
        ({"introspect": "snapshot", "introspection_token": "open sesame, no"}, "introspection_token"),
        ({"introspect": "snapshot", "introspection_token": ""}, "introspection_token"),
        ({"introspect": "snapshot", "introspection_token": 1}, "introspection_token"),
        ({"introspect": "snapshot", "introspection_token": "\ud800"}, "introspection_token"),
        ({"introspect": "nonsense"}, "introspection_token"),
        ({"introspect": "nonsense", "introspection_token": TOKEN}, "introspect"),
        ({"introspection_token": TOKEN}, "introspect"),
        ({"introspect": "snapshot", "introspection_token": TOKEN, "max_tokens": 1}, "max_tokens"),
        ({"introspect": "snapshot", "introspection_token": TOKEN, "cancel_request_id": "r"}, "cancel_request_id"),
        ({"introspect": "cancel", "introspection_token": TOKEN}, "cancel_request_id"),
        ({"introspect": "cancel", "introspection_token": TOKEN, "cancel_request_id": 3}, "cancel_request_id"),
        ({"introspect": "scale", "replicas": 2}, "introspection_token"),
        ({"introspect": "scale", "introspection_token": TOKEN}, "replicas"),
        ({"introspect": "scale", "introspection_token": TOKEN, "replicas": 0}, "replicas"),
        ({"introspect": "scale", "introspection_token": TOKEN, "replicas": 65}, "replicas"),
        ({"introspect": "scale", "introspection_token": TOKEN, "replicas": "2"}, "replicas"),
        ({"introspect": "scale", "introspection_token": TOKEN, "replicas": True}, "replicas"),
        ({"introspect": "snapshot", "introspection_token": TOKEN, "replicas": 2}, "replicas"),
        *(
            ({"introspect": name}, "introspection_token")
            for name in ("sleep", "wake_up", "update_weights", "reset_prefix_cache")
        ),
        ({"introspect": "sleep", "introspection_token": TOKEN, "tags": "weights"}, "tags"),
        ({"introspect": "wake_up", "introspection_token": TOKEN, "level": 1}, "level"),
        ({"introspect": "wake_up", "introspection_token": TOKEN, "cancel_request_id": "r"}, "cancel_request_id"),
        ({"introspect": "reset_prefix_cache", "introspection_token": TOKEN, "weights_path": "/x"}, "weights_path"),
    ],
)
def test_what_is_refused(said: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_introspection(parameters(**said), TokenGuard(TOKEN))
    assert error.value.parameter == parameter
    assert "sesam" not in str(error.value), "no message repeats a token"


def test_without_a_token_nobody_is_let_in_and_is_told_how_to_allow_it() -> None:
    for shown in ({}, {"introspection_token": ""}, {"introspection_token": "None"}):
        with pytest.raises(RequestError, match=r"model\.json.*QUIRE_INTROSPECTION_TOKEN"):
            parse_introspection(parameters(introspect="snapshot", **shown), TokenGuard(None))


def test_token_comes_from_the_settings_or_else_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    def token(**settings: str) -> str | None:
        (tmp_path / "model.json").write_text(json.dumps({"model": "m", **settings}))
        return load_engine_config(tmp_path).frontend.introspection_token

    monkeypatch.delenv("QUIRE_INTROSPECTION_TOKEN", raising=False)
    assert token() is None
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "")
    assert token() is None
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "from the outside")
    assert token() == "from the outside"
    assert token(introspection_token="from the inside.") == "from the inside."
    for bad in ("", " ", "söt", "a\nb"):
        with pytest.raises(ValueError, match=r"introspection_token must be") as error:
            token(introspection_token=bad)
        assert "söt" not in str(error.value)


def test_a_short_token_is_refused_where_it_was_said(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "model.json").write_text('{"model": "m", "introspection_token": "fifteen letters"}')
    with pytest.raises(
        ValueError, match=r"model\.json: introspection_token has 15 characters.*16.*openssl rand"
    ) as error:
        load_engine_config(tmp_path)
    assert "letters" not in str(error.value)
    (tmp_path / "model.json").write_text('{"model": "m"}')
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "fifteen letters")
    with pytest.raises(ValueError, match=r"^QUIRE_INTROSPECTION_TOKEN: introspection_token has 15 characters"):
        load_engine_config(tmp_path)


def test_guesses_are_told_of_and_lock_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    guard = TokenGuard(TOKEN, clock=lambda: now)
    for _ in range(100):
        with pytest.raises(RequestError, match="wrong"):
            guard.check("guess")
    guard.check(TOKEN)
    for _ in range(100):
        with pytest.raises(RequestError, match="missing"):
            guard.check(None)
    now += 60.0
    with pytest.raises(RequestError, match="wrong"):
        guard.check(["guess"])
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["1 times", "100 times"]


def snapshot(**changes: Any) -> Snapshot:
    engine = EngineSnapshot(True, 1, 0, 64, 2048)
    requests = [RequestSnapshot("r1", "decode")]
    return Snapshot(1.0, {}, engine, requests, 1, BlocksSnapshot(16, 0), PrefixTreeSnapshot(), **changes)


def ask(serving: Any, request_of: Any, **values: Any) -> Any:
    request = request_of(values)
    serving.submit(request)
    (response,) = request.sender.wait()
    assert request.sender.finals == [True]
    return response


def test_snapshot_is_answered_once_with_labels(engine: Any, serve: Any, request_of: Any) -> None:
    seen: list[Any] = []

    async def take_snapshot(labels: dict[str, str]) -> Snapshot:
        seen.append(labels)
        return snapshot()

    engine.snapshot = take_snapshot
    serving = serve(introspection_token=TOKEN)
    client = request_of(text_input="Hi", stream=True)
    serving.submit(client)
    engine.wait_for("add")
    response = ask(serving, request_of, introspect="snapshot", introspection_token=TOKEN)
    answer = json.loads(response.text)
    assert list(seen[0].values()) == ["label"]
    assert answer["requests"][0]["phase"] == "decode"
    assert answer["engine"]["queues"] == {"to_engine": 0, "responses": 0}


def test_cancel_says_whether_there_was_anything(engine: Any, serve: Any, request_of: Any) -> None:
    engine.cancel = lambda request_id: request_id == "r1"
    serving = serve(introspection_token=TOKEN)
    for request_id, cancelled in (("r1", True), ("r2", False)):
        response = ask(
            serving, request_of, introspect="cancel", introspection_token=TOKEN, cancel_request_id=request_id
        )
        assert json.loads(response.text) == {"cancelled": cancelled}


def test_replicas_are_changed_by_one_command_at_a_time(engine: Any, serve: Any, request_of: Any) -> None:
    is_ready = threading.Event()

    async def scale(num_replicas: int) -> None:
        await asyncio.to_thread(is_ready.wait)
        if num_replicas > 3:
            raise ScalingError("there is no memory for them")
        engine.num_replicas = num_replicas

    engine.scale = scale
    serving = serve(introspection_token=TOKEN)
    first = request_of({"introspect": "scale", "replicas": 3, "introspection_token": TOKEN})
    serving.submit(first)
    refused = ask(serving, request_of, introspect="scale", replicas=2, introspection_token=TOKEN)
    assert (refused.error.code, refused.error.message) == (
        "UNAVAILABLE", "the replicas are being changed; try again when that is done"
    )  # fmt: skip
    is_ready.set()
    assert json.loads(first.sender.wait()[-1].text) == {"replicas": 3, "before": 1}
    refused = ask(serving, request_of, introspect="scale", replicas=4, introspection_token=TOKEN)
    assert (refused.error.code, refused.error.message) == ("UNAVAILABLE", "there is no memory for them")
    answer = ask(serving, request_of, introspect="scale", replicas=3, introspection_token=TOKEN)
    assert json.loads(answer.text) == {"replicas": 3, "before": 3}


def test_operations_are_answered_once_it_is_so(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve(introspection_token=TOKEN)

    def operate(**values: Any) -> Any:
        response = ask(serving, request_of, introspection_token=TOKEN, **values)
        return json.loads(response.text) if response.error is None else response.error

    def is_sleeping() -> bool:
        answer = json.loads(ask(serving, request_of, introspect="health").text)
        assert answer["healthy"], "one that sleeps is not sick"
        return bool(answer["is_sleeping"])

    assert operate(introspect="sleep", level=2, mode="abort") == {"is_sleeping": True}
    assert is_sleeping()
    assert operate(introspect="wake_up") == {"is_sleeping": False}
    assert not is_sleeping()
    assert operate(introspect="update_weights", weights_path="/new") == {"weights_path": "/new"}
    assert operate(introspect="reset_prefix_cache") == {"reset": True}
    assert [event for event in engine.events if event != "start"] == ["sleep 2 abort", "weights /new", "reset"]

    async def fails(weights_path: str) -> None:
        raise {"a": RequestError("weights_path", "it is another model"), "b": EngineError("a tensor is damaged"),
               "c": OperationError("not now")}[weights_path]  # fmt: skip

    engine.update_weights = fails
    for path, code, message in (
        ("a", "INVALID_ARG", "it is another model"), ("b", "UNAVAILABLE", "a tensor is damaged"),
        ("c", "UNAVAILABLE", "not now"),
    ):  # fmt: skip
        error = operate(introspect="update_weights", weights_path=path)
        assert (error.code, error.message) == (code, message)


def test_a_request_that_a_sleeping_engine_rejects_says_how_to_wake_it_and_misses_no_objective(
    engine: Any, request_of: Any
) -> None:
    def sleeps(engine: Any, request_id: str) -> None:
        raise EngineSleepingError("the engine sleeps; wake it up first")

    rejected: list[Any] = []
    serving = Serving(engine, FrontendConfig(), rejected.append, model="tinypy")
    serving.start()
    engine.on_add = sleeps
    request = request_of(text_input="Hi")
    serving.submit(request)
    error = request.sender.wait()[-1].error
    serving.shutdown()
    assert error.code == "UNAVAILABLE"
    assert error.message.startswith("the engine sleeps; wake it up first (quire model wake tinypy, or POST /wake_up")
    assert [(one.slo_verdict, one.error_code) for one in rejected] == [(None, "unavailable")]


def test_a_model_that_is_unloaded_while_its_replicas_change_says_so(engine: Any, serve: Any, request_of: Any) -> None:
    begun = threading.Event()

    async def scale(num_replicas: int) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    engine.scale = scale
    serving = serve(introspection_token=TOKEN)
    command = request_of({"introspect": "scale", "replicas": 2, "introspection_token": TOKEN})
    serving.submit(command)
    assert begun.wait(60)
    serving.shutdown()
    assert command.sender.wait()[-1].error.code == "UNAVAILABLE"


def test_refusals_and_failures_are_answered_and_count_as_no_request(engine: Any, serve: Any, request_of: Any) -> None:
    rejected: list[Any] = []

    async def fail(labels: dict[str, str]) -> Snapshot:
        raise ZeroDivisionError("by design")

    engine.snapshot = fail
    serving = serve(introspection_token=TOKEN)
    serving._on_rejected = rejected.append
    assert ask(serving, request_of, introspect="snapshot").error.code == "INVALID_ARG"
    assert ask(serving, request_of, introspect="snapshot", introspection_token=TOKEN).error.code == "INTERNAL"
    engine.dead_error = "it is gone"
    engine.cancel = lambda request_id: False
    answer = ask(serving, request_of, introspect="cancel", introspection_token=TOKEN, cancel_request_id="r")
    assert json.loads(answer.text) == {"cancelled": False}, "an engine that is gone can still be asked about"
    answer = ask(serving, request_of, introspect="snapshot", introspection_token="guess")
    assert answer.error.code == "INVALID_ARG"
    serving.is_draining = True
    assert ask(serving, request_of, introspect="snapshot", introspection_token=TOKEN).error.code == "UNAVAILABLE"
    assert not rejected


def test_anybody_may_ask_whether_the_engine_runs(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve()
    assert json.loads(ask(serving, request_of, introspect="health").text) == {"healthy": True, "is_sleeping": False}
    said = {"tool_call_parser": "mistral", "reasoning_parser": None, "has_chat_template": True, "takes_images": False,
            "max_model_len": 64, "tasks": ["generate", "embed", "token_embed"]}  # fmt: skip
    assert json.loads(ask(serving, request_of, introspect="chat_format").text) == said
    engine.default_sampling_params = DefaultSamplingParams(values={"temperature": 0.6, "top_k": 4})
    engine.images = object()
    more = {"temperature": 0.6, "takes_images": True}
    assert json.loads(ask(serving, request_of, introspect="chat_format").text) == said | more
    engine.is_healthy = False
    assert json.loads(ask(serving, request_of, introspect="health").text) == {"healthy": False, "is_sleeping": False}
    response = ask(serving, request_of, introspect="health", cancel_request_id="r1")
    assert "introspection_token" in response.error.message
