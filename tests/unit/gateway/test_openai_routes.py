"""What the gateway says of itself and its models, where a key may stand, and pages of other origins."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from typing import Any

import pytest
from quire_gateway.settings import GatewaySettings
from support.gateway import Answer, gateway, response


def call(path: str, body: Any = None, headers: Mapping[str, str] | None = None, **settings: Any) -> Answer:
    """The answer of a gateway in front of a model `m`."""
    method, is_healthy = settings.pop("method", None), settings.pop("is_healthy", True)

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        if request.parameters["introspect"].string_param == "health":
            yield response(json.dumps({"healthy": is_healthy}), "stop")
        else:
            yield response("ok", "stop")

    async def go() -> Answer:
        async with gateway(serve, **settings) as (app, triton):
            triton.models["m"] = "quire"
            triton.chat_format = {"max_model_len": 4096}
            return await app.call(path, body, headers, method=method)

    return asyncio.run(asyncio.wait_for(go(), 20))


def test_a_model_is_listed_with_its_context() -> None:
    (card,) = call("/v1/models").json["data"]
    assert card.pop("created") > 0
    assert card == {
        "id": "m", "object": "model", "owned_by": "quire", "root": "m", "parent": None, "max_model_len": 4096,
    }  # fmt: skip
    one = call("/v1/models/m")
    assert (one.status, one.json["max_model_len"]) == (200, 4096)
    assert call("/v1/models/n").status == 404


def test_version_and_ping() -> None:
    assert call("/version").json == {"version": version("quire")}
    assert call("/version", api_keys=("sesam",)).status == 401
    for body in (None, {}):
        assert call("/ping", body, api_keys=("sesam",)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("HEAD", path, 200) for path in ("/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/m")),
        ("POST", "/health", 405),
        ("GET", "/v1/completions", 405),
        ("HEAD", "/tokenize", 405),
        ("GET", "/health/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
    ],
)
def test_a_probe_may_ask_for_the_head_and_other_methods_and_paths_are_rejected(
    method: str, path: str, status: int
) -> None:
    answer = call(path, {} if method == "POST" else None, method=method)
    assert answer.status == status
    assert method == "HEAD" or answer.json["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_an_unhealthy_server_says_when_to_try_again(path: str) -> None:
    answer = call(path, is_healthy=False)
    assert (answer.status, answer.json, answer.headers["retry-after"]) == (503, {"status": "unavailable"}, "5")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "sesam"}, 200),
        ({"x-api-key": "sesa"}, 401),
        ({"x-api-key": "Bearer sesam"}, 401),
        ({"x-api-key": "sesam", "authorization": "Bearer wrong"}, 200),
        ({"x-api-key": "wrong", "authorization": "Bearer sesam"}, 200),
        ({"x-api-key": ""}, 401),
    ],
)
def test_a_key_may_be_shown_as_anthropics_clients_do(headers: Mapping[str, str], status: int) -> None:
    assert call("/v1/models", None, headers, api_keys=("sesam", "other")).status == status


ORIGIN = "https://app.example"
BODY = {"model": "m", "prompt": "Hi"}
PREFLIGHT = {
    "origin": ORIGIN, "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}  # fmt: skip


def test_pages_of_other_origins_may_not_ask_unless_a_setting_says_so() -> None:
    assert call("/v1/completions", None, PREFLIGHT, method="OPTIONS").status == 405
    assert "access-control-allow-origin" not in call("/v1/completions", BODY, {"origin": ORIGIN}).headers


@pytest.mark.parametrize("origins", [(ORIGIN, "http://localhost:3000"), ("*",)])
def test_pages_of_the_origins_of_the_setting_may_ask(origins: tuple[str, ...]) -> None:
    allowed = "*" if origins == ("*",) else ORIGIN
    preflight = call("/v1/completions", None, PREFLIGHT, method="OPTIONS", cors_origins=origins, api_keys=("sesam",))
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, allowed)
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    key = {"origin": ORIGIN, "authorization": "Bearer sesam"}
    for headers, status in ((key, 200), ({"origin": ORIGIN}, 401)):  # a page can read why it is rejected
        answer = call("/v1/completions", BODY, headers, cors_origins=origins, api_keys=("sesam",))
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, allowed)
    other = call("/v1/completions", BODY, key | {"origin": "https://evil.example"}, cors_origins=(ORIGIN,))
    assert "access-control-allow-origin" not in other.headers
    assert call("/v1/completions", None, PREFLIGHT | {"origin": "https://evil.example"}, method="OPTIONS",
                cors_origins=(ORIGIN,)).status == 400  # fmt: skip


@pytest.mark.parametrize("origin", ["", "app.example", "https://app.example/", "https://a b", "https://"])
def test_an_origin_has_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        GatewaySettings(cors_origins=(origin,))
