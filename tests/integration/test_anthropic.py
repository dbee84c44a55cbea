"""The gateway as Anthropic's own client sees it, in front of a real tritonserver with the demo model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support.serving import Server

if TYPE_CHECKING:
    import anthropic  # in a second and a half, which every process of a test run would spend on collecting this file

pytestmark = pytest.mark.server

MODEL = "tinypy"
USER: Any = {"role": "user", "content": "add two numbers"}
SAID: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": [USER], "extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "add", "description": "Adds.",
    "input_schema": {
        "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
        "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client(gateway_server: Server) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    base_url = f"http://{gateway_server.openai}"
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_stream_is_the_same_message(client: "anthropic.Anthropic") -> None:
    whole = client.messages.create(**SAID, system="Be short.")
    with client.messages.stream(**SAID, system="Be short.") as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"]
    assert text == whole.content[0].text == streamed.content[0].text  # type: ignore[union-attr]
    assert (whole.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
    for message in (whole, streamed):
        usage = message.usage
        cached = usage.cache_read_input_tokens or 0
        counted = client.messages.count_tokens(model=MODEL, messages=[USER], system="Be short.")
        assert usage.input_tokens + cached == counted.input_tokens
        assert usage.output_tokens == 24
    assert whole._request_id


def test_a_stop_sequence_is_named(client: "anthropic.Anthropic") -> None:
    whole = client.messages.create(**SAID).content[0].text  # type: ignore[union-attr]
    stop = whole[8:11]
    message = client.messages.create(**SAID, stop_sequences=["never there", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == whole[: whole.index(stop)]  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_call_and_its_result(client: "anthropic.Anthropic", choice: Any) -> None:
    said = SAID | {"max_tokens": 200, "tools": [TOOL]}
    with client.messages.stream(**said, tool_choice=choice | {"disable_parallel_tool_use": True}) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert (call.type, message.stop_reason) == ("tool_use", "tool_use")
    assert call.name == "add"  # type: ignore[union-attr]
    assert call.input["a"] in range(10)  # type: ignore[union-attr, index]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}  # type: ignore[union-attr]
    turns = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(**SAID | {"messages": turns, "tools": [TOOL], "tool_choice": {"type": "none"}})
    assert again.usage.input_tokens > 0


def test_an_answer_goes_on_where_the_last_turn_ends(client: "anthropic.Anthropic") -> None:
    whole = client.messages.create(**SAID).content[0].text  # type: ignore[union-attr]
    turns = [USER, {"role": "assistant", "content": whole[:12]}]
    message = client.messages.create(**SAID | {"messages": turns})
    assert message.content[0].text  # type: ignore[union-attr]
    counted = [client.messages.count_tokens(model=MODEL, messages=turns[:n]).input_tokens for n in (1, 2)]
    assert counted[0] < counted[1] == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_errors_are_anthropics(client: "anthropic.Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="top_p is 3"):
        client.messages.create(**SAID | {"extra_body": {"top_p": 3}})
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**SAID | {"model": "nope"})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "not_found_error"
