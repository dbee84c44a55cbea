"""Pydantic AI, over chat completions and over responses."""

from checks import KEY, LONG, MODEL, QUESTION, V1, Box, main, raises_async
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=V1, api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=provider)
short = {"temperature": 0, "max_tokens": 24}
long = {"temperature": 0, "max_tokens": 200}


def error_of(text, **settings):
    return raises_async(ModelHTTPError, Agent(chat, model_settings={**short, **settings}).run(text))


class Checks:
    async def whole(self):
        result = await Agent(chat, model_settings=short).run(QUESTION)
        assert result.output.strip()
        assert result.usage.output_tokens

    async def stream(self):
        async with Agent(chat, model_settings=short).run_stream(QUESTION) as result:
            text = "".join([part async for part in result.stream_text(delta=True)])
        assert text == (await Agent(chat, model_settings=short).run(QUESTION)).output

    async def structured(self):
        for output in (ToolOutput(Box), NativeOutput(Box)):
            assert isinstance(
                (await Agent(chat, output_type=output, model_settings=long, retries=0).run(QUESTION)).output, Box
            )

    async def second_turn(self):
        agent = Agent(chat, output_type=ToolOutput(Box), model_settings=long, retries=0)
        first = await agent.run(QUESTION)
        assert isinstance((await agent.run("Another.", message_history=first.all_messages())).output, Box)

    async def responses(self):
        model = OpenAIResponsesModel(MODEL, provider=provider)
        assert (await Agent(model, model_settings=short).run(QUESTION)).output.strip()
        assert isinstance(
            (await Agent(model, output_type=ToolOutput(Box), model_settings=long).run(QUESTION)).output, Box
        )

    async def wrong_input(self):
        assert (await error_of(QUESTION, temperature=-1)).status_code == 400

    async def overflow(self):
        assert "context_length_exceeded" in str((await error_of(LONG)).body)


main("pydantic-ai-slim", Checks())
