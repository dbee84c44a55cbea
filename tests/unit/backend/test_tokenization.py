"""Tokens and their text, as the model answers them through the server."""

import json
from typing import Any

import pytest

MESSAGES = json.dumps([{"role": "user", "content": "Hi"}])


def test_tokens_of_texts_and_conversations_and_back(engine: Any, serve: Any, request_of: Any) -> None:
    serving = serve()

    def answer(task: str, **inputs: Any) -> Any:
        request = request_of({"task": task}, **inputs)
        serving.submit(request)
        (response,) = request.sender.wait()
        return json.loads(response.text)

    assert answer("tokenize", text_input="Hi")["tokens"] == [72, 105]
    assert answer("tokenize", messages=MESSAGES)["tokens"] == [72, 105]
    assert answer("detokenize", input_ids=[72, 105]) == {"prompt": "Hi"}
    assert not engine.sinks, "nothing is generated"


@pytest.mark.parametrize(
    ("parameters", "inputs", "message"),
    [
        ({"task": "dance"}, {"text_input": "Hi"}, "task is 'dance'; it must be one of tokenize, detokenize"),
        ({"task": "tokenize"}, {"input_ids": [1]}, "task is tokenize; it must be given with text_input or messages"),
        ({"task": "tokenize"}, {"prompt_embeds": [[0.5]]}, "task is tokenize; it must be given with text_input"),
        ({"task": "detokenize"}, {"prompt_embeds": [[0.5]]}, "task is detokenize; it must be given with input_ids"),
        ({"task": "detokenize"}, {"text_input": "Hi"}, "task is detokenize; it must be given with input_ids"),
        ({"task": "tokenize", "top_k": 1}, {"text_input": "Hi"}, "top_k has no meaning in a request with task"),
        ({"task": "tokenize", "add_special_tokens": "yes"}, {"text_input": "Hi"}, "add_special_tokens is 'yes'"),
        ({"task": "tokenize"}, {}, "text_input is missing"),
    ],
)
def test_what_cannot_be_asked_is_named(serve: Any, request_of: Any, parameters: Any, inputs: Any, message: str) -> None:
    request = request_of(parameters, **inputs)
    serve().submit(request)
    error = request.sender.wait()[-1].error
    assert error.code == "INVALID_ARG"
    assert error.message.startswith(message)
