"""Chat templates: rendered as transformers does, and ended where they would never end."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_engine.errors import RequestError
from quire_engine.frontend.chat_template import ChatTemplateError, ChatTemplateRenderer, Conversation
from quire_engine.frontend.input_processor import InputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import EngineCoreReady
from quire_engine.system import limited_process
from quire_engine.system.process_state import is_running

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
SAID = [{"role": "user", "content": "Grüße \U0001f600\n", "name": None}, {"role": "assistant", "content": "b"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatTemplateRenderer]:
    made = ChatTemplateRenderer(seconds=1.0)
    yield made
    made._stop()


def pid_of(renderer: ChatTemplateRenderer) -> int:
    assert renderer._process is not None
    return renderer._process.pid


@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        "{{ bos_token }}{{ messages | tojson }}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "{% for m in messages %}\n  {%- if loop.first %}{% continue %}{% endif %}{{ m.keys() | list }}\n{% endfor %}",
        "{% set x = namespace(n=0) %}{% for m in messages %}{% set x.n = x.n + 1 %}{% endfor %}{{ x.n }}",
    ],
)
def test_the_text_is_that_of_transformers(template: str, renderer: ChatTemplateRenderer) -> None:
    tokenizer = load_tokenizer(TINYPY)
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(SAID, tokenize=False, add_generation_prompt=True)
    assert renderer.render(template, Conversation(SAID), tokenizer.special_tokens_map) == expected


def test_functions_and_variables_are_what_transformers_gives_a_template() -> None:
    inputs = InputProcessor(load_tokenizer(TINYPY), EngineCoreReady(vocab_size=4096, max_model_len=64))
    inputs.tokenizer.chat_template = "{{ messages | tojson }}{{ tools | tojson if tools }}{{ enable_thinking }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for said in ({}, {"tools": tools, "enable_thinking": False}):
        expected = inputs.tokenizer.apply_chat_template(SAID, add_generation_prompt=True, return_dict=False, **said)
        variables = {name: value for name, value in said.items() if name != "tools"}
        assert inputs.apply_chat_template(Conversation(SAID, said.get("tools", []), variables)) == expected
    with pytest.raises(RequestError, match="chat_template_kwargs holds 'chat_template', which a request cannot set"):
        inputs.apply_chat_template(Conversation(SAID, [], {"chat_template": "{{ 1 }}"}))
    inputs.shutdown()


def test_a_conversation_may_end_as_it_is_or_go_on_in_its_last_message() -> None:
    inputs = InputProcessor(load_tokenizer(TINYPY), EngineCoreReady(vocab_size=4096, max_model_len=64))
    tokenizer = inputs.tokenizer
    tokenizer.chat_template = PLAIN + "{% if add_generation_prompt %}assistant:{% endif %}"
    for ending in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        expected = tokenizer.apply_chat_template(SAID, return_dict=False, **ending)
        assert inputs.apply_chat_template(Conversation(SAID, **ending)) == expected
    assert inputs.decode(expected) == "user: Grüße \U0001f600\n;assistant: b"
    tokenizer.chat_template = "nothing of it"
    with pytest.raises(RequestError, match="messages: the chat template failed: continue_final_message is set"):
        inputs.apply_chat_template(Conversation(SAID, continue_final_message=True))
    inputs.shutdown()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
         "{% endfor %}", "more than 1 s of processor time"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
        ("{{ 'x' * 10 ** 11 }}", "more than 512 MiB"),
        ("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
         "more than 512 MiB"),
        ("{{ 9 ** (9 ** 9) }}", "more than 1 s of processor time"),
        ("{{ 'x' * 20000000 }}", "makes 20000000 characters; at most 16777216"),
        ("{{ raise_exception('no tools\nhere') }}", "no tools"),
        ("{{ raise_exception('') }}", "it gives no reason"),
        ("{% for %}", "Expected"),
        ("{{ messages[0].content.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}", "unsafe"),
    ],
    ids=["loops", "recursion", "product", "doubling", "power", "long", "raises", "raises nothing", "syntax", "escape"],
)  # fmt: skip
def test_a_template_that_would_never_end_is_ended_and_the_next_one_is_rendered(
    template: str, reason: str, renderer: ChatTemplateRenderer
) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        renderer.render(template, Conversation(SAID), {})
    assert renderer.render(PLAIN, Conversation([{"role": "a", "content": "b"}]), {}) == "a: b;"


def test_what_is_no_json_is_refused(renderer: ChatTemplateRenderer) -> None:
    with pytest.raises(ChatTemplateError, match="no JSON"):
        renderer.render(PLAIN, Conversation([{"role": "user", "content": object()}]), {})


def test_one_process_renders_all_and_ends_with_its_renderer() -> None:
    renderer = ChatTemplateRenderer()
    renderer.render(PLAIN, Conversation(SAID), {})
    pid = pid_of(renderer)
    renderer.render(PLAIN, Conversation(SAID), {})
    assert pid_of(renderer) == pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChatTemplateError, match="crashes"):
        renderer.render(PLAIN, Conversation(SAID), {})
    assert renderer.render(PLAIN, Conversation(SAID), {}).startswith("user: ")
    pid = pid_of(renderer)
    del renderer
    gc.collect()
    assert not is_running(pid)


def test_a_process_that_was_stopped_is_ended(renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer.render(PLAIN, Conversation(SAID), {})
    os.kill(pid_of(renderer), signal.SIGSTOP)
    monkeypatch.setattr(renderer, "_wall_seconds", 0.5)
    with pytest.raises(ChatTemplateError):
        renderer.render(PLAIN, Conversation(SAID), {})
    monkeypatch.undo()
    assert renderer.render(PLAIN, Conversation(SAID), {}).startswith("user: ")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            "{{ raise_exception('roles must\nalternate') }}",
            SAID,
            "messages: the chat template failed: roles must alternate",
        ),
        (None, SAID, "messages: the model has no chat template; give a prompt of text instead"),
        (PLAIN, [], "messages is empty; it must hold at least one message"),
        (PLAIN, ["x"], "messages holds 'x'; it must hold objects with role and content"),
    ],
    ids=["refuses", "none", "empty", "text"],
)
def test_what_a_caller_hears_is_one_line(template: str | None, messages: Any, message: str) -> None:
    inputs = InputProcessor(load_tokenizer(TINYPY), EngineCoreReady(vocab_size=4096, max_model_len=64))
    inputs.tokenizer.chat_template = template
    with pytest.raises(RequestError) as raised:
        inputs.apply_chat_template(Conversation(messages))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_the_deadline_is_of_one_conversation_and_not_of_imports_or_the_idleness_between_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = ChatTemplateRenderer()
    running: set[object] = set()
    limits: list[float] = []

    class Timer:
        """Never passes; knows whether it would."""

        def __init__(self, seconds: float, kill: object) -> None:
            limits.append(seconds)

        def start(self) -> None:
            running.add(self)

        def cancel(self) -> None:
            running.remove(self)

    monkeypatch.setattr(limited_process.threading, "Timer", Timer)
    pids = set()
    for _ in range(2):
        renderer.render(PLAIN, Conversation(SAID), {})
        assert not running
        pids.add(pid_of(renderer))
    assert len(pids) == 1
    assert limits == [limited_process.START_SECONDS, *[limited_process.WALL_SECONDS] * 2]
