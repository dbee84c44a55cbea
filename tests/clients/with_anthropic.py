"""Anthropic's own client."""

import anthropic
from checks import KEY, LONG, MODEL, QUESTION, URL, Box, main, raises

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": QUESTION}]
greedy = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
tool = {"name": "pack", "description": "Pack a box.", "input_schema": Box.model_json_schema()}
called = {"tools": [tool], "tool_choice": {"type": "any"}, **greedy, "max_tokens": 200}


class Checks:
    def whole(self):
        answer = client.messages.create(messages=messages, system="Be brief.", **greedy)
        assert answer.content[0].text.strip()
        assert answer.usage.output_tokens
        assert answer.stop_reason in ("end_turn", "max_tokens")

    def stream(self):
        with client.messages.stream(messages=messages, **greedy) as events:
            text = "".join(events.text_stream)
        assert text == client.messages.create(messages=messages, **greedy).content[0].text

    def tools(self):
        answer = client.messages.create(messages=messages, **called)
        Box.model_validate(next(block.input for block in answer.content if block.type == "tool_use"))
        assert answer.stop_reason == "tool_use"
        with client.messages.stream(messages=messages, **called) as events:
            final = events.get_final_message()
        Box.model_validate(next(block.input for block in final.content if block.type == "tool_use"))

    def second_turn(self):
        answer = client.messages.create(messages=messages, **called)
        call = next(block for block in answer.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "packed"}
        history = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(messages=history, tools=[tool], **greedy).stop_reason

    def count_tokens(self):
        counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        usage = client.messages.create(messages=messages, **greedy).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    def wrong_input(self):
        raises(
            anthropic.BadRequestError,
            client.messages.create,
            messages=messages,
            **{**greedy, "extra_body": {"temperature": -1}},
        )
        raises(
            anthropic.NotFoundError, client.messages.create, messages=messages, **{**greedy, "model": "no-such-model"}
        )

    def overflow(self):
        error = raises(
            anthropic.BadRequestError, client.messages.create, messages=[{"role": "user", "content": LONG}], **greedy
        )
        assert "prompt is too long" in str(error) or "context" in str(error), error


main("anthropic", Checks())
