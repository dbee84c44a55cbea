"""Bodies of any shape: none is a fault of ours, and what is wrong with one is named.

The gateway is whole but for the server: in its place the model's own parser reads each request, so that its refusals
are the real ones. `QUIRE_FUZZ_BODIES=10000` has as many bodies, and others each time.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_backend.request import parse_request
from quire_engine.errors import RequestError
from quire_gateway.app import make_app
from quire_gateway.settings import GatewaySettings
from quire_gateway.triton_client import ModelError, TritonClient
from quire_gateway.triton_messages import Delta
from support.gateway import Gateway, running

NUM_BODIES = int(os.environ.get("QUIRE_FUZZ_BODIES", "0"))

# -- bodies -----------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.integers(-2, 30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 2), st.text(max_size=8), st.sampled_from(["auto", "none", "required", "text", "json_object", "user"]),
)  # fmt: skip
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
SCHEMA = st.sampled_from(
    [{"type": "object"}, {"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}, {"not": {}}, {}]
)
FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "", "a b"]) | JSON}, optional={"parameters": SCHEMA | JSON, "strict": JSON}
)
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION | JSON}) | JSON
FLAT_TOOL = FUNCTION.map(lambda function: {"type": "function", **function}) | JSON
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.sampled_from(["{}", "[", "[1]"]) | JSON})}
)
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "image_url"]), "text": st.text() | JSON})
CONTENT = st.text(max_size=9) | st.lists(PART | JSON, max_size=2) | JSON
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]) | JSON},
    optional={"content": CONTENT, "tool_calls": st.lists(CALL | JSON, max_size=2) | JSON, "name": JSON},
)
KINDS = ["message", "reasoning", "function_call", "function_call_output", "x"]
ITEM = st.one_of(
    MESSAGE, JSON,
    st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS) | JSON},
        optional={"role": JSON, "content": CONTENT, "call_id": JSON, "name": JSON, "arguments": JSON, "output": CONTENT,
                  "summary": CONTENT, "input": JSON},
    ),
)  # fmt: skip
CHOICE = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.just("f")}) | JSON, "name": JSON}
)
CHOICE |= st.fixed_dictionaries(
    {"type": st.just("allowed_tools")},
    optional={
        "mode": st.sampled_from(["auto", "required"]) | JSON, "tools": st.lists(CHOICE | JSON, max_size=2) | JSON,
        "allowed_tools": st.fixed_dictionaries({"mode": st.just("auto"), "tools": st.lists(CHOICE | JSON)}) | JSON,
    },
)  # fmt: skip
FORMAT = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "structural_tag"]) | JSON},
    optional={"json_schema": st.fixed_dictionaries({"schema": SCHEMA | JSON}) | JSON, "schema": SCHEMA | JSON},
)

SAMPLING: dict[str, Any] = dict.fromkeys(
    (
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "n", "stop", "seed", "logit_bias", "user",
        "presence_penalty", "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "prompt_logprobs",
        "priority", "slo_class", "slo_ttft_ms", "cache_salt", "traceparent", "store", "metadata", "structured_outputs",
        "guided_json", "guided_regex", "guided_choice", "response_format", "unknown", "skip_special_tokens", "logprobs",
    ), JSON,
)  # fmt: skip
SAMPLING |= {"return_token_ids": st.booleans() | JSON, "return_tokens_as_token_ids": st.booleans() | JSON}
SAMPLING |= {"stream": st.booleans() | JSON, "stream_options": st.dictionaries(st.just("include_usage"), JSON) | JSON}
CHAT_ONLY = {
    "top_logprobs": JSON, "max_completion_tokens": JSON, "response_format": FORMAT | JSON, "include_reasoning": JSON,
    "tools": st.lists(TOOL, max_size=2) | JSON, "tool_choice": CHOICE | JSON, "parallel_tool_calls": JSON,
    "chat_template_kwargs": JSON, "reasoning_effort": JSON, "functions": JSON, "logprobs": st.booleans() | JSON,
}  # fmt: skip
RESPONSES_ONLY = {
    "instructions": JSON, "max_output_tokens": JSON, "text": st.dictionaries(st.just("format"), FORMAT | JSON) | JSON,
    "reasoning": st.dictionaries(st.just("effort"), JSON) | JSON, "include": JSON, "previous_response_id": JSON,
    "tools": st.lists(FLAT_TOOL, max_size=2) | JSON, "tool_choice": CHOICE | JSON, "background": JSON,
    "messages": JSON, "truncation": JSON, "parallel_tool_calls": JSON,
}  # fmt: skip
BLOCK = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"]) | JSON},
        optional={"text": JSON, "thinking": JSON, "id": JSON, "name": JSON, "input": JSON, "tool_use_id": JSON,
                  "content": CONTENT, "is_error": JSON},
    ), JSON,
)  # fmt: skip
TURN = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]) | JSON,
                           "content": st.lists(BLOCK, max_size=3) | CONTENT}), JSON,
)  # fmt: skip
MESSAGES_ONLY = {
    "system": CONTENT, "stop_sequences": JSON, "thinking": st.dictionaries(st.just("type"), JSON) | JSON,
    "tools": st.lists(st.fixed_dictionaries({"name": st.just("f"), "input_schema": SCHEMA | JSON}) | JSON, max_size=2),
    "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"]) | JSON}) | JSON,
    "output_config": st.dictionaries(st.sampled_from(["format", "effort"]), FORMAT | JSON) | JSON,
    "mcp_servers": JSON, "cache_control": JSON, "container": JSON,
}  # fmt: skip
MODEL = {"model": st.just("m") | JSON}


def bodies(needed: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Any]:
    """A few fields at a time: of many wrong ones, only one is ever looked at."""
    few = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: optional[name] for name in names})
    )
    whole = st.tuples(st.fixed_dictionaries(needed), few).map(lambda parts: parts[0] | parts[1])
    return (
        whole | whole.flatmap(lambda body: st.sampled_from(sorted(body)).map(lambda name: without(body, name))) | JSON
    )


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in body.items() if other != name}


BODIES = {
    "/v1/completions": bodies(
        MODEL | {"prompt": st.text(min_size=1, max_size=9) | st.lists(st.text(max_size=3) | JSON, max_size=3) | JSON},
        SAMPLING | {"echo": JSON},
    ),
    "/v1/chat/completions": bodies(
        MODEL | {"messages": st.lists(MESSAGE, min_size=1, max_size=3) | JSON}, SAMPLING | CHAT_ONLY
    ),
    "/v1/responses": bodies(
        MODEL | {"input": st.text(max_size=9) | st.lists(ITEM, max_size=3) | JSON}, SAMPLING | RESPONSES_ONLY
    ),
    "/v1/messages": bodies(
        MODEL | {"messages": st.lists(TURN, min_size=1, max_size=3) | JSON, "max_tokens": st.integers(1, 99) | JSON},
        SAMPLING | MESSAGES_ONLY,
    ),
}

# -- the gateway ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    """Sends one body; in the server's place, `parse_request` reads what arrives."""
    makers: list[Any] = []

    class Client(TritonClient):
        async def models(self) -> list[str]:
            return ["m", "n"]

        async def ask(self, model: str, question: str) -> dict[str, Any]:
            return {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}

        async def run_task(
            self, model: str, task: str, prompt: Any, num_bytes: int, **parameters: bool
        ) -> dict[str, Any]:
            return {"prompt": "x", "tokens": [3], "token_strs": ["x"], "max_model_len": 9}

        async def generate(
            self, model: str, prompt: Any, sampling: Any, *,
            stream: bool, request_id: str, response_id: str, outputs: Any = (), num_bytes: int = 0,
        ) -> AsyncGenerator[Delta, None]:  # fmt: skip
            inputs: dict[str, Any] = {"sampling_parameters": json.dumps(sampling), "stream": stream}
            inputs |= {f"return_{name}": True for name in outputs}
            if isinstance(prompt, str):
                inputs["text_input"] = prompt
            elif isinstance(prompt, list):
                inputs["input_ids"] = prompt
            else:
                inputs["messages"] = json.dumps(prompt)
            try:
                parsed = parse_request(makers[-1](**inputs))
            except RequestError as error:
                raise ModelError(400, str(error)) from None
            params, own = parsed.sampling_params, parsed.options.outputs
            logprobs = (
                None
                if params.logprobs is None
                else [msgspec.Raw(b'{"1":{"logprob":-1.0,"rank":1,"decoded_token":"x"}}')]
            )
            yield Delta(
                texts=['<think>a</think>b<tool_call>{"name": "f"}</tool_call>'] * params.n, num_prompt_tokens=1,
                finish_reasons=["stop"] * params.n, num_output_tokens=[1] * params.n, num_cached_tokens=None,
                logprobs=[logprobs] * params.n,
                prompt_logprobs=None if params.prompt_logprobs is None else [msgspec.Raw(b"null")],
                token_ids=[[5]] * params.n if "token_ids" in own else None,
                prompt_token_ids=[3] if "prompt_token_ids" in own else None,
            )  # fmt: skip

    loop = asyncio.new_event_loop()
    context = running(make_app(GatewaySettings(), Client))
    gateway: Gateway = loop.run_until_complete(context.__aenter__())

    def send(path: str, body: Any, request_of: Any) -> Any:
        makers.append(request_of)
        return loop.run_until_complete(gateway.call(path, [body]))

    yield send
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_fault_and_what_is_wrong_is_named(path: str, call: Any, request_of: Any) -> None:
    @settings(
        max_examples=NUM_BODIES // len(BODIES) + 1 if NUM_BODIES else 100, deadline=None, database=None,
        derandomize=not NUM_BODIES, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(body=BODIES[path])
    def check(body: Any) -> None:
        answer = call(path, json.dumps(body).encode(), request_of)
        if answer.status == 200:
            assert isinstance(body, dict)
            return
        error = answer.json["error"]
        assert answer.status in (400, 503), (body, error)
        assert error["message"], body
        if isinstance(body, dict):
            missing = {"model", "prompt", "messages", "input", "previous_response_id", "max_tokens"} - body.keys()
            named = re.match(r"\w+", error["message"])
            param = (
                error["param"] if "param" in error else named and named[0]
            )  # Anthropic's errors have no field for it
            assert param in body or param in missing, (body, error)
            assert param[:100] in error["message"], (body, error)

    check()
