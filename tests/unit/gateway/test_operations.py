"""What an operator switches over HTTP: what reaches the model, and what is answered. The model is a test's."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest
from support.gateway import Answer, gateway, response

TOKEN = {"authorization": "Bearer the token"}


def call(
    path: str, body: Any = None, headers: Mapping[str, str] = TOKEN, error: str = "", models: tuple[str, ...] = ("m",),
    **settings: Any,
) -> tuple[Answer, list[dict[str, Any]]]:  # fmt: skip
    """The answer, and the parameters of what reached the model, which fails with an error if there is one."""
    asked: list[dict[str, Any]] = []

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        said = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in request.parameters.items()}
        asked.append({"model": request.model_name, **said})
        if error:
            code, _, message = error.partition(" ")
            await context.abort(grpc.StatusCode[code], message)
        else:
            yield response(json.dumps({"is_sleeping": True}), "stop")

    async def go() -> Answer:
        async with gateway(serve, **settings) as (app, triton):
            triton.models |= dict.fromkeys(models, "quire")
            method = "GET" if path.startswith("/is_sleeping") else "POST"
            return await app.call(path, body, headers, method=method)

    return asyncio.run(asyncio.wait_for(go(), 20)), asked


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/sleep", None, {"introspect": "sleep"}),
        ("/sleep?level=1", None, {"introspect": "sleep", "level": 1}),
        ("/sleep?level=2&mode=abort&model=m", None, {"introspect": "sleep", "level": 2, "mode": "abort"}),
        ("/sleep?level=deep", None, {"introspect": "sleep", "level": "deep"}),
        ("/wake_up", None, {"introspect": "wake_up"}),
        ("/reset_prefix_cache", None, {"introspect": "reset_prefix_cache"}),
        ("/update_weights", {"weights_path": "/new"}, {"introspect": "update_weights", "weights_path": "/new"}),
    ],
)
def test_what_reaches_the_model(path: str, body: Any, expected: dict[str, Any]) -> None:
    answer, asked = call(path, body)
    assert (answer.status, answer.json) == (200, {"is_sleeping": True})
    assert asked == [{"model": "m", "introspection_token": "the token", **expected}]


def test_whether_it_sleeps_needs_no_token() -> None:
    answer, asked = call("/is_sleeping", headers={})
    assert (answer.status, answer.json) == (200, {"is_sleeping": True})
    assert asked == [{"model": "m", "introspect": "health"}]


@pytest.mark.parametrize(
    ("path", "body", "error", "status", "param"),
    [
        ("/sleep?tags=weights", None, "", 400, "tags"),
        ("/wake_up?level=1", None, "", 400, "level"),
        ("/is_sleeping?level=1", None, "", 400, "level"),
        ("/update_weights", {}, "", 400, "weights_path"),
        ("/update_weights", {"weights_path": 3}, "", 400, "weights_path"),
        ("/update_weights", {"weights_path": "/x", "load_format": "auto"}, "", 400, "load_format"),
        ("/update_weights", [b"nonsense"], "", 400, None),
        ("/sleep?level=3", None, "INVALID_ARGUMENT level is 3; it must be 1", 400, "level"),
        ("/sleep?model=other", None, "INVALID_ARGUMENT introspect is refused: this model has no token", 400, None),
        ("/sleep", None, "INVALID_ARGUMENT unauthorized: introspection_token is missing", 401, None),
        ("/wake_up", None, "UNAVAILABLE wake_up: no memory; the engine still sleeps", 503, None),
        ("/update_weights", {"weights_path": "x"}, "INVALID_ARGUMENT weights_path is 'x'", 400, "weights_path"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path: str, body: Any, error: str, status: int, param: Any) -> None:
    answer, asked = call(path, body, error=error)
    assert answer.status == status, answer.body
    assert answer.json["error"]["param"] == param
    assert error.partition(" ")[2] in answer.json["error"]["message"]
    assert bool(asked) == bool(error)


def test_a_body_that_no_key_lets_in_is_small() -> None:
    answer, asked = call("/update_weights", {"weights_path": "/" * (1 << 16)}, headers={}, api_keys=("sesam",))
    assert (answer.status, asked) == (413, [])


def test_of_several_models_one_has_to_be_named() -> None:
    answer, asked = call("/wake_up", models=("a", "b"))
    assert (answer.status, answer.json["error"]["param"], asked) == (400, "model", [])
    answer, asked = call("/wake_up?model=b", models=("a", "b"))
    assert (answer.status, asked[0]["model"]) == (200, "b")


def test_a_key_of_the_gateway_does_not_replace_the_token() -> None:
    answer, asked = call("/sleep", headers=TOKEN, api_keys=("sesam",))
    assert (answer.status, asked[0]["introspection_token"]) == (200, "the token")
    answer, asked = call("/sleep", headers={"authorization": "Bearer sesam"}, api_keys=("sesam",))
    assert asked[0]["introspection_token"] == "sesam", "which the model rejects"
    assert call("/is_sleeping", headers={}, api_keys=("sesam",))[0].status == 401
