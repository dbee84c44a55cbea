"""How a model writes calls and reasoning, as its chat template shows."""

from typing import Any

import pytest
from quire_backend.chat_format import chat_format

QWEN2_5 = r"""{%- if tools %}{{- "return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\":
<function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}{%- endif %}{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}{%- endif %}"""
QWEN3 = (
    QWEN2_5.replace(
        "assistant\\n' }}",
        r"assistant\n' }}{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}",
    )
    + r"{%- set content = message.content.split('</think>')[-1] %}"
)
QWEN3_CODER = r"""<tool_call>\n<function=example>\n<parameter=a>\n</parameter>\n</function>\n</tool_call>"""
LLAMA3_1 = r"""{{- 'Respond in the
format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
<|start_header_id|>{{- "<|python_tag|>" }}"""
MISTRAL = """{{- "[TOOL_CALLS][" }}"""
DEEPSEEK_R1 = r"""{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{% if add_generation_prompt and not ns.is_tool %}{{'Assistant: <think>\n'}}{% endif %}"""
GPT_OSS = r"""{{- "<|start|>assistant<|channel|>analysis<|message|>" }}{%- if add_generation_prompt -%}
<|start|>assistant{%- endif -%}"""


@pytest.mark.parametrize(
    ("template", "tool_call_parser", "reasoning_parser"),
    [
        (None, None, None),
        ("{{ messages }}", None, None),
        (QWEN2_5, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (QWEN3_CODER, None, None),
        (LLAMA3_1, "llama3_json", None),
        (LLAMA3_1.replace('"', '\\"'), "llama3_json", None),
        (MISTRAL, "mistral", None),
        (MISTRAL + QWEN2_5, None, None),
        (DEEPSEEK_R1, None, "deepseek_r1"),
        (GPT_OSS, "openai", "openai_gptoss"),
    ],
)
def test_what_a_template_shows(template: Any, tool_call_parser: Any, reasoning_parser: Any) -> None:
    shown = chat_format(template, "auto", "auto")
    assert shown == {"tool_call_parser": tool_call_parser, "reasoning_parser": reasoning_parser}


def test_a_setting_comes_before_the_template() -> None:
    assert chat_format(QWEN3, "mistral", None) == {"tool_call_parser": "mistral", "reasoning_parser": None}
    assert chat_format(GPT_OSS, None, None) == {"tool_call_parser": None, "reasoning_parser": None}
