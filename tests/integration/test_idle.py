"""A server that idles for longer than most deadlines of its watchdogs: everything is as it was, and answers at once."""

import asyncio
import json
import time
import urllib.request
from typing import Any

import openai
import pytest
from support.clients import MODEL, ask, http, with_client
from support.full import FULL
from support.serving import Server, serve
from tritonclient.grpc import aio as grpc_aio

pytestmark = [pytest.mark.server, pytest.mark.slow]

IDLE_SECONDS = 60.0 if FULL else 35.0
"""Servers are held to be stable after 30."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOKEN = "a token for tests"


def one_of_each_kind(server: Server, size: int) -> None:
    """A request of every kind that another process, thread or connection takes part in.

    Args:
        server: the server.
        size: of the grammars, which are compiled anew for each size.
    """
    schema = {**SCHEMA, "title": f"of size {size}"}

    async def over_grpc(client: grpc_aio.InferenceServerClient) -> None:
        streamed = await ask(client, text_input="def f(x):", stream=True, max_tokens=8, ignore_eos=True, temperature=0)
        assert streamed.text
        for format_ in ({"json": schema, "disable_any_whitespace": True}, {"regex": f"[ab]{{{size}}}"}):
            answer = await ask(
                client, text_input="x = ", max_tokens=40, structured_outputs=format_, temperature=0,
                exclude_input_in_output=True,
            )  # fmt: skip
            assert json.loads(answer.text) if "json" in format_ else len(answer.text) == size
        scored = await ask(client, text_input="x = ", max_tokens=4, logprobs=2, return_logprobs=True, temperature=0)
        assert scored.text
        seen = await ask(client, parameters={"introspect": "snapshot", "introspection_token": TOKEN})
        assert json.loads(seen.text)

    asyncio.run(with_client(server, over_grpc))
    body = {"text_input": "x = ", "parameters": {"max_tokens": 4}}
    status, answer = http(server, f"/v2/models/{MODEL}/generate", body)
    assert status == 200, answer
    with openai.OpenAI(base_url=f"http://{server.openai}/v1", api_key="none", max_retries=0, timeout=60) as client:
        chat: Any = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=4, logprobs=True, stream=True
        )
        assert list(chat)
        assert client.completions.create(model=MODEL, prompt="x = ", max_tokens=4).choices[0].text
    data = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{server.openai}/tokenize", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["tokens"]


def test_after_some_idleness_nothing_is_killed_or_warned_of() -> None:
    with serve("--openai", "--openai-port", "0", env={"QUIRE_INTROSPECTION_TOKEN": TOKEN}) as server:
        one_of_each_kind(server, 3)
        before, log = sorted(server.run_id.processes()), server.log()
        time.sleep(IDLE_SECONDS)  # the idleness is what is tested
        one_of_each_kind(server, 4)
        assert sorted(server.run_id.processes()) == before
        news = server.log()[len(log) :]
        assert not [line for line in news.splitlines() if any(word in line for word in ("WARN", "ERROR", "again"))], (
            news
        )
