"""Guidance's classes for OpenAI's API and for vLLM's server."""

from checks import KEY, MODEL, V1, Box, NotOfferedError, main
from guidance import assistant, gen, models, select, user
from guidance import json as as_json
from guidance.models.experimental import VLLMModel


def ask(kind, grammar):
    model = kind(MODEL, base_url=V1, api_key=KEY, echo=False)
    with user():
        model += "What is the capital of France?"
    with assistant():
        model += grammar
    return model["found"]


def ask_vllm(grammar):
    """VLLMModel sends every grammar in llguidance's own format, free text too."""
    try:
        return ask(VLLMModel, grammar)
    except Exception as error:
        if "directive %llguidance is not supported" in str(error):
            raise NotOfferedError(f"llguidance's format: {error}") from None
        raise


class Checks:
    def openai_text(self):
        assert ask(models.OpenAI, gen("found", max_tokens=16)).strip()

    def openai_json(self):
        Box.model_validate_json(ask(models.OpenAI, as_json("found", schema=Box, max_tokens=200)))

    def vllm_text(self):
        assert ask_vllm(gen("found", max_tokens=16)).strip()

    def vllm_json(self):
        Box.model_validate_json(ask_vllm(as_json("found", schema=Box, max_tokens=200)))

    def vllm_select(self):
        assert ask_vllm(select(["Paris", "Rome"], name="found")) in ("Paris", "Rome")


main("guidance", Checks())
