"""LiteLLM, as `hosted_vllm/…` and `openai/…`."""

import json

import litellm
from checks import KEY, LONG, MODEL, QUESTION, V1, Box, main, raises

litellm.suppress_debug_info = True
messages = [{"role": "user", "content": QUESTION}]
schema = {"name": "pack", "description": "Pack a box.", "parameters": Box.model_json_schema()}
tool = {"type": "function", "function": schema}
PROVIDERS = ("hosted_vllm", "openai")


def complete(provider="hosted_vllm", **options):
    given = {"messages": messages, "max_tokens": 24, "temperature": 0, "num_retries": 0, **options}
    return litellm.completion(model=f"{provider}/{MODEL}", api_base=V1, api_key=KEY, **given)


class Checks:
    def whole(self):
        for provider in PROVIDERS:
            answer = complete(provider)
            assert answer.choices[0].message.content.strip()
            assert answer.usage.completion_tokens

    def stream(self):
        for provider in PROVIDERS:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in complete(provider, stream=True))
            assert text == complete(provider).choices[0].message.content

    def tools(self):
        for provider in PROVIDERS:
            answer = complete(provider, tools=[tool], tool_choice="required", max_tokens=200)
            Box.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)

    def second_turn(self):
        message = complete(tools=[tool], tool_choice="required", max_tokens=200).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps({"packed": True})}
        complete(messages=[*messages, message.model_dump(), result], tools=[tool])

    def structured(self):
        for provider in PROVIDERS:
            answer = complete(provider, response_format=Box, max_tokens=200)
            Box.model_validate_json(answer.choices[0].message.content)

    def text_completion(self):
        answer = litellm.text_completion(
            model=f"text-completion-openai/{MODEL}", api_base=V1, api_key=KEY, prompt="def f(", max_tokens=8
        )
        assert answer.choices[0].text

    def wrong_input(self):
        for provider in PROVIDERS:
            raises(litellm.BadRequestError, complete, provider, temperature=-1)

    def overflow(self):
        for provider in PROVIDERS:
            long = [{"role": "user", "content": LONG}]
            raises(litellm.ContextWindowExceededError, complete, provider, messages=long)


main("litellm", Checks())
