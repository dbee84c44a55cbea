"""What is found in a model's text, at every split of it: calls, reasoning, content."""

from collections.abc import Iterable
from typing import Any

import pytest
from quire_engine.config.frontend_config import REASONING_PARSERS, TOOL_CALL_PARSERS
from quire_gateway.chat_answers import Said
from quire_gateway.output_parser import (
    REASONING_FORMS,
    TOOL_CALL_FORMS,
    Form,
    OutputParser,
    harmony,
    named_call,
    plain,
    required_calls,
)

NAMES = ("now", "weather")
HERMES = TOOL_CALL_FORMS["hermes"](NAMES)
LLAMA = TOOL_CALL_FORMS["llama3_json"](NAMES)
MISTRAL = TOOL_CALL_FORMS["mistral"](NAMES)
QWEN3 = REASONING_FORMS["qwen3"](HERMES)
R1 = REASONING_FORMS["deepseek_r1"](plain)
WEATHER = '{"city": "Köln {[\\"", "days": [1, 2]}'
CALL = f'{{"name": "weather", "arguments": {WEATHER}}}'
LLAMA_CALL = f'{{"name": "weather", "parameters": {WEATHER}}}'

Expected = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, and calls."""


def said(form: Form, parts: Iterable[str]) -> Expected:
    parser = OutputParser(form)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    found = Said(pieces + parser.finish())
    assert parser.finish() == []
    assert parser.num_calls == len(found.calls)
    return found.content, found.reasoning, [(str(name), arguments) for name, arguments in found.calls.values()]


CASES: dict[str, tuple[Form, str, Expected]] = {
    # Hermes, Qwen.
    "text": (HERMES, " 1 < 2 \n", (" 1 < 2 \n", "", [])),
    "call": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", ("", "", [("weather", WEATHER)])),
    "text and two calls": (
        HERMES,
        f'I look.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>\n',
        ("I look.", "", [("weather", WEATHER), ("now", "{}")]),
    ),
    "text between calls": (
        HERMES, f"a <tool_call>{CALL}</tool_call>\n b\n<tool_call>{CALL}</tool_call>",
        ("a \n b", "", [("weather", WEATHER)] * 2),
    ),
    "no end of a call": (HERMES, f"<tool_call>{CALL}<tool_call>{CALL}", ("", "", [("weather", WEATHER)] * 2)),
    "arguments first": (
        HERMES, f'<tool_call>{{"arguments": {WEATHER}, "name": "weather"}}</tool_call>',
        ("", "", [("weather", WEATHER)]),
    ),
    "arguments in a string": (
        HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [("now", '{"a": 1}')])
    ),
    "arguments of null": (
        HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', ("", "", [("now", "{}")])
    ),
    "cut in the arguments": (
        HERMES, '<tool_call>{"name": "now", "arguments": {"a": "b', ("", "", [("now", '{"a": "b')])
    ),
    "cut before the name": (HERMES, '<tool_call>\n{"na', ('<tool_call>\n{"na', "", [])),
    "no call in the tag": (
        HERMES, f'<tool_call>what?</tool_call> <tool_call>{{"a": 1}}<tool_call>{CALL}</tool_call>',
        ('<tool_call>what?</tool_call> <tool_call>{"a": 1}', "", [("weather", WEATHER)]),
    ),
    "half a tag": (HERMES, "a <tool_c", ("a <tool_c", "", [])),
    # Llama 3.
    "llama": (LLAMA, LLAMA_CALL, ("", "", [("weather", WEATHER)])),
    "llama, two": (
        LLAMA, f'\n{LLAMA_CALL}; {{"type": "function", "name": "now", "parameters": {{}}}}',
        ("", "", [("weather", WEATHER), ("now", "{}")]),
    ),
    "llama, tagged": (
        LLAMA, '<|python_tag|>{"name": "other", "parameters": {}}', ("", "", [("other", "{}")])
    ),
    "llama, tagged code": (LLAMA, "<|python_tag|>search.call(1)", ("search.call(1)", "", [])),
    "llama, text": (LLAMA, f"So: {LLAMA_CALL}", (f"So: {LLAMA_CALL}", "", [])),
    "llama, JSON that is no call": (
        LLAMA, '{"name": "Ada", "parameters": {}}', ('{"name": "Ada", "parameters": {}}', "", [])
    ),
    "llama, other keys": (LLAMA, '{"city": {"name": "now"}}', ('{"city": {"name": "now"}}', "", [])),
    "llama, text after a call": (LLAMA, f"{LLAMA_CALL} there", ("there", "", [("weather", WEATHER)])),
    # Mistral.
    "mistral": (
        MISTRAL, f'ok [TOOL_CALLS] [{CALL}, {{"name": "now", "arguments": {{}}}}]',
        ("ok", "", [("weather", WEATHER), ("now", "{}")]),
    ),
    "mistral, new": (
        MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{WEATHER}[TOOL_CALLS]now{{}}",
        ("", "", [("weather", WEATHER), ("now", "{}")]),
    ),
    "mistral, no call": (MISTRAL, "[TOOL_CALLS][1, 2] [x]", ("[TOOL_CALLS][1, 2] [x]", "", [])),
    "mistral, cut": (MISTRAL, f"[TOOL_CALLS][{CALL}, {{", ("", "", [("weather", WEATHER)])),
    # gpt-oss.
    "harmony": (
        harmony(True),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>Yes.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{WEATHER}<|call|>"
        f"<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}",
        ("I look.", "Hm.\n\nYes.", [("weather", WEATHER), ("now", "{}")]),
    ),
    "harmony, the answer": (
        harmony(False), "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>2 < 3\n",
        ("2 < 3", "Hm.", []),
    ),
    "harmony, no tools": (
        harmony(False), "<|channel|>commentary to=functions.now<|message|>{}<|call|>", ("{}", "", [])
    ),
    "harmony, cut": (harmony(True), "<|channel|>analysis<|mess", ("", "", [])),
    "harmony, no header": (harmony(True), " plain <|end|>", (" plain ", "", [])),
    # Reasoning.
    "think": (QWEN3, "<think>\nHm <tool_call>\n</think>\n\nYes. ", ("Yes.", "Hm <tool_call>", [])),
    "think and call": (QWEN3, f"<think>Hm</think>\n<tool_call>{CALL}</tool_call>", ("", "Hm", [("weather", WEATHER)])),
    "no thought": (QWEN3, "\nYes </think>.", ("\nYes </think>.", "", [])),
    "an empty thought": (QWEN3, "<think>\n\n</think>\n\nYes.", ("Yes.", "", [])),
    "thinking all the time": (QWEN3, "<think>Hm </thin", ("", "Hm </thin", [])),
    "the prompt begins to think": (R1, "Hm.\n</think>\nYes.", ("Yes.", "Hm.", [])),
    "and so does the answer": (R1, "<think>\nHm.</think>Yes.", ("Yes.", "Hm.", [])),
    # What a grammar has made.
    "named": (named_call("now"), WEATHER, ("", "", [("now", WEATHER)])),
    "required": (required_calls, f"[{LLAMA_CALL}, {CALL}]", ("", "", [("weather", WEATHER)] * 2)),
    "required, cut": (required_calls, f"[{LLAMA_CALL[:-2]}", ("", "", [("weather", WEATHER[:-1])])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_split_of_the_text_shows_the_same(name: str) -> None:
    form, text, expected = CASES[name]
    assert said(form, [text]) == expected
    assert said(form, text) == expected  # character by character
    for i in range(len(text)):
        assert said(form, [text[:i], text[i:]]) == expected, (text[:i], text[i:])


def test_text_and_arguments_are_passed_on_as_they_come() -> None:
    parser = OutputParser(HERMES)
    shown: list[Any] = [
        Said(parser.feed(part)) for part in ("Hel", "lo", ' <tool_call>{"name": "now", "arguments": {"a', '": 1', "}}")
    ]
    assert [item.content for item in shown] == ["Hel", "lo", "", "", ""]
    assert [item.calls.get(0) for item in shown] == [None, None, ("now", '{"a'), (None, '": 1'), (None, "}")]


def test_long_texts_in_small_parts_take_no_longer_for_their_length() -> None:
    parser = OutputParser(QWEN3)
    for _ in range(5_000):
        parser.feed("word < ")
        assert len(parser._text._buffer) < 100


def test_the_settings_name_what_there_is() -> None:
    assert {*TOOL_CALL_PARSERS} == {*TOOL_CALL_FORMS, "openai"}
    assert {*REASONING_PARSERS} == {*REASONING_FORMS, "openai_gptoss"}
