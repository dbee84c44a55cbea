"""LangChain's ChatOpenAI."""

import openai
from checks import EMBEDDER, KEY, LONG, MODEL, QUESTION, TEXTS, V1, Box, check_vectors, main, raises
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

model = ChatOpenAI(base_url=V1, api_key=KEY, model=MODEL, temperature=0, max_tokens=200, max_retries=0)
short = model.model_copy(update={"max_tokens": 24})


@tool(args_schema=Box)
def pack(**box) -> str:
    """Pack a box."""
    return "packed"


class Checks:
    def whole(self):
        answer = short.invoke(QUESTION)
        assert answer.text.strip()
        assert answer.usage_metadata["output_tokens"]

    async def stream(self):
        chunks = [chunk async for chunk in short.astream(QUESTION, stream_usage=True)]
        assert "".join(chunk.text for chunk in chunks) == short.invoke(QUESTION).text

    def tools(self):
        call = model.bind_tools([pack], tool_choice="required").invoke(QUESTION).tool_calls[0]
        Box.model_validate(call["args"])

    def second_turn(self):
        asked = HumanMessage(QUESTION)
        answer = model.bind_tools([pack], tool_choice="required").invoke([asked])
        result = ToolMessage("packed", tool_call_id=answer.tool_calls[0]["id"])
        short.bind_tools([pack]).invoke([asked, answer, result])

    def embeddings(self):
        # Its count of tokens is that of OpenAI's models, whose vocabulary it would download.
        embedder = OpenAIEmbeddings(model=EMBEDDER, base_url=V1, api_key=KEY, check_embedding_ctx_length=False)
        check_vectors(embedder.embed_documents(TEXTS), embedder.embed_query(QUESTION))

    def structured(self):
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Box, method=method).invoke(QUESTION), Box), method

    def responses(self):
        answer = short.model_copy(update={"use_responses_api": True}).invoke(QUESTION)
        assert answer.text.strip()

    def wrong_input(self):
        raises(openai.BadRequestError, model.bind(temperature=-1).invoke, QUESTION)

    def overflow(self):
        error = raises(openai.BadRequestError, short.invoke, LONG)
        assert type(error).__name__ == "OpenAIContextOverflowError", type(error)


main("langchain-openai", Checks())
