"""How a model writes calls of functions and reasoning, by the names of vLLM's parsers."""

import re

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
_OTHER_TOOL_CALLS = ("<function=", "<arg_key>", "<parameter")
"""Forms with `<tool_call>` around something else than JSON."""
_LLAMA = '"parameters": dictionary of argument name and its value}'
"""What Llama 3's own templates tell the model."""
_GENERATION_PROMPT = re.compile(r"\bif\b[^%]*\badd_generation_prompt\b")


def chat_format(
    template: str | None, tool_call_parser: str | None, reasoning_parser: str | None
) -> dict[str, str | None]:
    """The settings, with what the template shows in place of `auto`; None: nothing that is certain.

    Args:
        template: the checkpoint's chat template.
        tool_call_parser: the setting of that name.
        reasoning_parser: the setting of that name.
    """
    template = template or ""
    if all(mark in template for mark in _HARMONY) and tool_call_parser == reasoning_parser == "auto":
        return {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    return {
        "tool_call_parser": _tool_call_parser(template) if tool_call_parser == "auto" else tool_call_parser,
        "reasoning_parser": _reasoning_parser(template) if reasoning_parser == "auto" else reasoning_parser,
    }


def _tool_call_parser(template: str) -> str | None:
    is_there = {
        "hermes": "<tool_call>" in template and "</tool_call>" in template
        and not any(mark in template for mark in _OTHER_TOOL_CALLS),
        "mistral": "[TOOL_CALLS]" in template,
        "llama3_json": _LLAMA in template.replace('\\"', '"') and "<|start_header_id|>" in template,
    }  # fmt: skip
    found = [name for name, is_found in is_there.items() if is_found]
    return found[0] if len(found) == 1 else None


def _reasoning_parser(template: str) -> str | None:
    if "</think>" not in template:
        return None
    prompts = list(_GENERATION_PROMPT.finditer(template))
    generation_prompt = template[prompts[-1].start() :] if prompts else ""
    opens = "<think>" in generation_prompt and "</think>" not in generation_prompt
    return "deepseek_r1" if opens else "qwen3"
