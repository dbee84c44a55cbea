"""Adapters in the gateway: models of their own in every route, and the routes that load and unload them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from quire_gateway.triton_client import TritonClient
from support.gateway import FakeTriton, Gateway, gateway, response, texts_of, vectors

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SUCCESS = b"Success: LoRA adapter 'alice' %s successfully."
BEARER = {"authorization": "Bearer the token"}
USER = [{"role": "user", "content": "x"}]


class Model:
    """Models `m`, which takes adapters, and others if a test says so."""

    fake: FakeTriton

    def __init__(self) -> None:
        self.loras = ["alice", "bob"]
        self.asked: list[tuple[str, str | None]] = []
        """Model and adapter of each request."""

    async def serve(self, request: Any, context: Any) -> AsyncIterator[Any]:
        parameters = {name: (value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()}
        said = {name: getattr(value, kind) for name, (value, kind) in parameters.items() if kind}
        if "introspect" in said:
            yield response(await self.operate(said, context))
            return
        texts = texts_of(request)
        said |= json.loads(texts.get("sampling_parameters") or texts.get("pooling_parameters") or "{}")
        name = said.get("lora_name")
        self.asked.append((request.model_name, name))
        if request.model_name not in self.fake.models:
            what = f"Request for unknown model: '{request.model_name}' is not found"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        if name is not None and name not in self.loras:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"LoRA {name} is not supported")
        if "pooling_parameters" in texts:
            yield vectors([[1.0, 2.0]])
        elif said.get("task") == "tokenize":
            yield response(json.dumps({"tokens": [1], "max_model_len": 64, "token_strs": ["x"]}))
        else:
            yield response("ok", "stop")

    async def operate(self, said: dict[str, Any], context: Any) -> str:
        if said.get("introspection_token") != "the token":
            what = "wrong" if "introspection_token" in said else "missing"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unauthorized: introspection_token is {what}")
        if said["introspect"] == "load_lora":
            if said["lora_path"] == "/none":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "lora_path is '/none': there is no such folder")
            if said["lora_name"] not in self.loras:
                self.loras.append(said["lora_name"])
        elif said["introspect"] == "unload_lora":
            if said["lora_name"] not in self.loras:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"LoRA {said['lora_name']} is not supported")
            self.loras.remove(said["lora_name"])
        return "{}"


def run(check: Any, **settings: Any) -> Model:
    model = Model()

    async def main() -> None:
        async with gateway(model.serve, **settings) as (served, model.fake):
            model.fake.models = {"m": "quire"}
            model.fake.chat_format = {"loras": model.loras, "max_model_len": 64}
            await check(model, served)

    asyncio.run(main())
    return model


def test_an_adapter_is_a_model_of_the_list_with_its_parent() -> None:
    async def check(model: Model, served: Gateway) -> None:
        cards = (await served.call("/v1/models")).json["data"]
        assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
            ("m", None, "m"), ("alice", "m", "m"), ("bob", "m", "m"),
        ]  # fmt: skip
        assert {card["max_model_len"] for card in cards} == {64}
        assert (await served.call("/v1/models/alice")).json == cards[1]
        assert (await served.call("/v1/models/eve")).status == 404
        model.fake.models["bob"] = "quire"  # a served model is what its name means
        cards = (await served.call("/v1/models")).json["data"]
        assert [card["parent"] for card in cards if card["id"] == "bob"] == [None]

    run(check)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4}),
        ("/v1/embeddings", {"input": "x"}),
        ("/classify", {"input": "x"}),
    ],
)
def test_every_route_takes_an_adapter_as_the_model(path: str, body: dict[str, Any]) -> None:
    async def check(model: Model, served: Gateway) -> None:
        for name in ("alice", "m", "bob"):
            answer = await served.call(path, body | {"model": name})
            assert answer.status == 200
            assert f'"model":"{name}"'.encode() in answer.body.replace(b": ", b":")
        lost = await served.call(path, body | {"model": "m", "lora_name": "eve"})
        assert lost.status == 404
        twice = await served.call(path, body | {"model": "alice", "lora_name": "bob"})
        assert twice.status == 400
        assert "lora_name is given with the model 'alice'" in twice.body.decode()

    assert run(check).asked == [("m", "alice"), ("m", None), ("m", "bob"), ("m", "eve")]


def test_tokens_of_an_adapter_are_its_models() -> None:
    async def check(model: Model, served: Gateway) -> None:
        assert (await served.call("/tokenize", {"model": "alice", "prompt": "x"})).json["tokens"] == [1]
        counted = await served.call("/v1/messages/count_tokens", {"model": "bob", "messages": USER})
        assert counted.json == {"input_tokens": 1}

    assert run(check).asked == [("m", None), ("m", None)]


def test_an_adapter_is_loaded_served_and_unloaded() -> None:
    async def check(model: Model, served: Gateway) -> None:
        del model.loras[0]
        ask = {"model": "alice", "prompt": "x"}
        missing = await served.call("/v1/completions", ask)
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
        body = {"lora_name": "alice", "lora_path": "/adapters/alice"}
        loaded = await served.call(LOAD, body, BEARER)
        assert (loaded.status, loaded.body) == (200, SUCCESS % b"added")
        assert (await served.call("/v1/completions", ask)).status == 200
        unloaded = await served.call(UNLOAD, {"lora_name": "alice", "lora_int_id": 1}, BEARER)
        assert (unloaded.status, unloaded.body) == (200, SUCCESS % b"removed")
        assert (await served.call("/v1/completions", ask)).status == 404
        again = await served.call(UNLOAD, {"lora_name": "alice"}, BEARER)
        assert again.status == 404

    run(check)


def test_an_adapter_that_another_has_unloaded_is_unknown_and_one_that_was_loaded_is_known() -> None:
    async def check(model: Model, served: Gateway) -> None:
        assert (await served.call("/v1/completions", {"model": "alice", "prompt": "x"})).status == 200
        model.loras[0] = "carol"
        gone = await served.call("/v1/completions", {"model": "alice", "prompt": "x"})
        assert (gone.status, gone.json["error"]["code"]) == (404, "model_not_found")
        assert (await served.call("/v1/completions", {"model": "carol", "prompt": "x"})).status == 200

    run(check)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        (LOAD, {"lora_name": "alice", "lora_path": "/a"}, {}, 401, "introspection_token is missing: send it as"),
        (LOAD, {"lora_name": "m", "lora_path": "/a"}, {"authorization": "Bearer x"}, 401, "is wrong"),
        (LOAD, {"lora_name": "eve", "lora_path": "/a"}, {"authorization": "Basic the token"}, 401, "missing"),
        (UNLOAD, {"lora_name": "alice"}, {}, 401, "introspection_token is missing"),
        (LOAD, {"lora_name": "m", "lora_path": "/a"}, BEARER, 400, "lora_name is 'm', which is a served model"),
        (LOAD, {"lora_name": "eve", "lora_path": "/none"}, BEARER, 400, "there is no such folder"),
        (LOAD, {"lora_name": "eve"}, BEARER, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_path": "/a"}, BEARER, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_name": 1, "lora_path": "/a"}, BEARER, 400, "Both"),
        (LOAD, {"lora_name": "eve", "lora_path": ["/a"]}, BEARER, 400, "Both"),
        (LOAD, {"lora_name": "eve", "lora_path": "/a", "load_inplace": 1}, BEARER, 400, "true or false"),
        (LOAD, {"lora_name": "eve", "lora_path": "/a", "rank": 1}, BEARER, 400, "rank is not a field of this route"),
        (
            LOAD,
            {"lora_name": "eve", "lora_path": "/a", "model": "x"},
            BEARER,
            400,
            "model is 'x'; it must be the served",
        ),
        (LOAD, [1], BEARER, 400, "the body must be a JSON object"),
        (UNLOAD, {}, BEARER, 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        (UNLOAD, {"lora_name": ""}, BEARER, 400, "'lora_name' needs to be provided"),
        (UNLOAD, {"lora_name": "eve"}, BEARER, 404, "LoRA eve is not supported"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(path: str, body: Any, headers: Any, status: int, words: str) -> None:
    async def check(model: Model, served: Gateway) -> None:
        body_parts = [json.dumps(body).encode()] if isinstance(body, list) else body
        answer = await served.call(path, body_parts, headers)
        assert (answer.status, words in answer.json["error"]["message"]) == (status, True), answer.json
        assert model.loras == ["alice", "bob"]

    run(check)


def test_operators_need_no_api_key_and_one_that_has_a_key_is_no_operator() -> None:
    async def check(model: Model, served: Gateway) -> None:
        key = {"authorization": "Bearer sk-1"}
        assert (await served.call("/v1/completions", {"prompt": "x", "model": "m"})).status == 401
        assert (await served.call(UNLOAD, {"lora_name": "alice"}, key)).status == 401
        assert (await served.call(UNLOAD, {"lora_name": "alice"}, BEARER)).status == 200

    run(check, api_keys=("sk-1",))


def test_an_adapter_of_two_models_is_named_with_its_model() -> None:
    async def check(model: Model, served: Gateway) -> None:
        model.fake.models["n"] = "quire"  # which says the same of itself
        both = await served.call("/v1/completions", {"model": "alice", "prompt": "x"})
        assert both.status == 400
        assert "an adapter of m and of n; give one of these as the model" in both.json["error"]["message"]
        named = await served.call("/v1/completions", {"model": "n", "lora_name": "alice", "prompt": "x"})
        assert named.status == 200
        assert model.asked == [("n", "alice")]
        assert (await served.call(LOAD, {"lora_name": "eve", "lora_path": "/a"}, BEARER)).status == 400
        taken = await served.call(LOAD, {"lora_name": "bob", "lora_path": "/a", "model": "m"}, BEARER)
        assert "lora_name is 'bob', which is an adapter of n; choose another" in taken.json["error"]["message"]
        assert (await served.call(UNLOAD, {"lora_name": "bob", "model": "m"}, BEARER)).status == 200

    run(check)


def test_a_list_from_before_a_load_is_not_taken_for_one_from_after_it() -> None:
    loras, begun, may_end = ["alice"], asyncio.Event(), asyncio.Event()

    class Client(TritonClient):
        async def models(self) -> list[str]:
            return ["m"]

        async def _card(self, model: str) -> dict[str, Any]:
            card = {"loras": list(loras)}
            begun.set()
            await may_end.wait()
            return card

        async def _introspect(self, model: str, parameters: Any, timeout: float | None = None) -> Any:
            loras.append(parameters["lora_name"])

    async def main() -> None:
        client = Client("127.0.0.1:1")
        before = asyncio.create_task(client.cards())
        await begun.wait()
        await client.operate("m", "load_lora", {"lora_name": "eve"}, "the token")
        begun.clear()
        found = asyncio.create_task(client.find("eve"))
        await asyncio.wait_for(begun.wait(), 10)
        may_end.set()
        assert await found == ("m", "eve")
        assert await before == {"m": {"loras": ["alice"]}}
        await client.close()

    asyncio.run(main())
