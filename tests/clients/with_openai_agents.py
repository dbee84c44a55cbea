"""OpenAI's Agents SDK, over chat completions and over responses."""

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from checks import KEY, LONG, MODEL, QUESTION, V1, Box, main, raises_async

client = openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
MODELS = [kind(model=MODEL, openai_client=client) for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)]


def agent(model, max_tokens=24, **options):
    settings = ModelSettings(
        temperature=0, max_tokens=max_tokens, tool_choice="required" if "tools" in options else None
    )
    return Agent(name="clerk", instructions="Be brief.", model=model, model_settings=settings, **options)


class Checks:
    async def whole(self):
        for model in MODELS:
            assert (await Runner.run(agent(model), QUESTION)).final_output.strip()

    async def stream(self):
        for model in MODELS:
            result = Runner.run_streamed(agent(model), QUESTION)
            events = [event async for event in result.stream_events() if event.type == "raw_response_event"]
            text = "".join(one.data.delta for one in events if one.data.type == "response.output_text.delta")
            assert text == result.final_output

    async def structured(self):
        for model in MODELS:
            assert isinstance((await Runner.run(agent(model, 200, output_type=Box), QUESTION)).final_output, Box)

    async def tools_and_second_turn(self):
        packed = []

        @function_tool
        def pack(box: Box) -> str:
            """Pack a box."""
            packed.append(box)
            return "packed"

        for model in MODELS:
            result = await Runner.run(agent(model, 200, tools=[pack]), QUESTION, max_turns=3)
            assert result.final_output is not None
        assert len(packed) == len(MODELS)

    async def overflow(self):
        for model in MODELS:
            error = await raises_async(openai.BadRequestError, Runner.run(agent(model), LONG))
            assert error.code == "context_length_exceeded", error


main("openai-agents", Checks())
