"""Chat templates, rendered in a process of their own: `python -m quire_engine.frontend.chat_template`.

A template is a program that comes with the checkpoint. Its sandbox protects files and Python itself, but does not limit
nested loops or strings that fill the memory. So it runs in a process with limits of the kernel.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire_engine.errors import EngineError
from quire_engine.system.limited_process import LimitedProcess, serve

TWO_ENDINGS = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
"""vLLM's message for a conversation that is to end in both ways."""

RENDER_SECONDS = 5.0
"""CPU time for one conversation; usual ones take milliseconds."""
RENDER_MEMORY_BYTES = 512 << 20
"""On top of the idle process."""
MAX_CHARACTERS = 16 << 20
"""Length of the rendered text."""


class ChatTemplateError(EngineError):
    """A conversation could not be rendered; the message says why."""


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the checkpoint's chat template makes of messages."""

    messages: Sequence[Any]
    """Each is an object with role and content, which `ConversationRenderer` checks."""
    tools: list[dict[str, Any]] = []
    """Functions that the model may call, as OpenAI describes them."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the template."""
    add_generation_prompt: bool = True
    """Whether it ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether it ends within its last message instead, which the answer continues."""
    images: Sequence[Any] = ()
    """Images and videos for the places `{"type": "image"}` and `{"type": "video"}` in contents, in their order; other
    parts hold their own."""


class _Job(msgspec.Struct, array_like=True):
    template: str
    conversation: Conversation
    seconds: float


class _Result(msgspec.Struct, array_like=True):
    text: str = ""
    error: str | None = None


class ChatTemplateRenderer(LimitedProcess):
    """Renders conversations within limits. Thread-safe.

    Args:
        seconds: of CPU time for one conversation.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        super().__init__("quire_engine.frontend.chat_template")
        self._seconds = seconds

    def render(self, template: str, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        """The text of a conversation, up to where the answer begins.

        Fields of messages that are None count as absent, as in transformers, but a content is then empty, as in vLLM:
        templates expect one beside calls, too.

        Args:
            template: in Jinja.
            conversation: its messages are mappings.
            variables: others that the template may use, such as `bos_token`; the conversation's own come first.

        Raises:
            ChatTemplateError: the template fails, rejects the messages, or exceeds its time or memory.
        """
        messages = [
            {name: "" if value is None else value for name, value in message.items()
             if value is not None or name == "content"}
            for message in conversation.messages
        ]  # fmt: skip
        variables = {**variables, **conversation.chat_template_kwargs}
        plain = msgspec.structs.replace(conversation, messages=messages, chat_template_kwargs=variables)
        try:
            job = msgspec.json.encode(_Job(template, plain, self._seconds))
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"it is no JSON: {error}") from None
        answer = self.ask(job)
        if not answer:
            raise ChatTemplateError(f"it takes more than {self._seconds:.0f} s of processor time, or crashes")
        result = msgspec.json.decode(answer, type=_Result)
        if result.error is not None:
            raise ChatTemplateError(result.error)
        return result.text


def _render(job: _Job) -> _Result:
    from transformers.utils.chat_template_utils import render_jinja_template

    said: Any = job.conversation
    try:
        rendered: Any = render_jinja_template(
            conversations=[said.messages], tools=said.tools or None, chat_template=job.template,
            add_generation_prompt=said.add_generation_prompt and not said.continue_final_message,
            continue_final_message=said.continue_final_message,
            **said.chat_template_kwargs,
        )  # fmt: skip
        text = rendered[0][0]
    except MemoryError:
        return _Result(error=f"it takes more than {RENDER_MEMORY_BYTES >> 20} MiB")
    except RecursionError:
        return _Result(error="it is nested too deeply")
    except Exception as error:  # a template can raise anything
        return _Result(error=str(error).strip()[:1000] or "it gives no reason")
    if len(text) > MAX_CHARACTERS:
        return _Result(error=f"it makes {len(text)} characters; at most {MAX_CHARACTERS} are taken")
    return _Result(text)


def main() -> None:
    """Entry point of the child process."""
    _render(_Job("", Conversation([{}]), 0))  # import everything before the limits are set
    serve(_Job, _render, RENDER_MEMORY_BYTES)


if __name__ == "__main__":
    main()
