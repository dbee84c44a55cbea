"""OpenAI's own client."""

import json

import openai
from checks import EMBEDDER, KEY, LONG, MODEL, QUESTION, TEXTS, V1, Box, check_vectors, main, raises

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": QUESTION}]
greedy = {"model": MODEL, "temperature": 0, "max_tokens": 24}
tool = openai.pydantic_function_tool(Box, name="pack", description="Pack a box.")


def call_tool():
    answer = client.chat.completions.create(
        messages=messages, tools=[tool], tool_choice="required", **{**greedy, "max_tokens": 200}
    )
    return answer.choices[0].message


class Checks:
    def whole(self):
        answer = client.chat.completions.create(messages=messages, **greedy)
        assert answer.choices[0].message.content.strip()
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def stream(self):
        whole = client.chat.completions.create(messages=messages, **greedy).choices[0].message.content
        chunks = list(
            client.chat.completions.create(
                messages=messages, stream=True, stream_options={"include_usage": True}, **greedy
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
        assert chunks[-1].usage.completion_tokens

    def completions(self):
        answer = client.completions.create(prompt="The capital of France is", logprobs=2, **greedy)
        assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text

    def tools(self):
        Box.model_validate_json(call_tool().tool_calls[0].function.arguments)

    def tools_stream(self):
        with client.chat.completions.stream(
            messages=messages, tools=[tool], tool_choice="required", **{**greedy, "max_tokens": 200}
        ) as events:
            call = events.get_final_completion().choices[0].message.tool_calls[0]
        assert isinstance(call.function.parsed_arguments, Box)

    def second_turn(self):
        message = call_tool()
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps({"packed": True})}
        answer = client.chat.completions.create(messages=[*messages, message, result], tools=[tool], **greedy)
        assert answer.choices[0].finish_reason

    def structured(self):
        answer = client.chat.completions.parse(messages=messages, response_format=Box, **{**greedy, "max_tokens": 200})
        assert isinstance(answer.choices[0].message.parsed, Box)

    def responses(self):
        answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=24, temperature=0)
        assert answer.output_text.strip()
        events = list(
            client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=24, temperature=0, stream=True)
        )
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == answer.output_text
        again = client.responses.create(
            model=MODEL, input=[*messages, *answer.output, {"role": "user", "content": "Why?"}], max_output_tokens=8
        )
        assert again.usage.output_tokens
        parsed = client.responses.parse(
            model=MODEL, input=QUESTION, text_format=Box, max_output_tokens=200, temperature=0
        )
        assert isinstance(parsed.output_parsed, Box)

    def embeddings(self):
        asked = [*TEXTS, QUESTION]
        vectors = [one.embedding for one in client.embeddings.create(model=EMBEDDER, input=asked).data]  # as base64
        check_vectors(vectors[:-1], vectors[-1])
        answer = client.embeddings.create(model=EMBEDDER, input=asked, encoding_format="float")
        assert [one.embedding for one in answer.data] == vectors
        assert answer.usage.total_tokens > len(asked)
        error = raises(openai.BadRequestError, client.embeddings.create, model=EMBEDDER, input=asked, dimensions=9999)
        assert error.param == "dimensions"
        error = raises(openai.BadRequestError, client.completions.create, prompt="Hi", **{**greedy, "model": EMBEDDER})
        assert error.param == "model"

    def wrong_input(self):
        error = raises(
            openai.BadRequestError, client.chat.completions.create, model=MODEL, messages=messages, temperature=-1
        )
        assert error.param == "temperature"
        raises(openai.NotFoundError, client.chat.completions.create, model="no-such-model", messages=messages)

    def overflow(self):
        error = raises(
            openai.BadRequestError,
            client.chat.completions.create,
            messages=[{"role": "user", "content": LONG}],
            **greedy,
        )
        assert error.code == "context_length_exceeded", error
        raises(openai.BadRequestError, client.completions.create, prompt=LONG, **greedy)


main("openai", Checks())
