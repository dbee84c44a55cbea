"""The playground page: a streamed completion or chat, with the request's timings, and how to send it from elsewhere."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import streamlit as st
from quire_client import Chunk, Client, ClientError
from streamlit.delta_generator import DeltaGenerator

from quire_dashboard import choice, frame, snippets, watchers, words
from quire_dashboard.choice import slo_class_picker

_MOST_SEED = 2**63 - 1
"""Triton's integer request parameters are int64."""
_TIMEOUT_S = 600.0
_BEAT_S = 0.25
"""While the server is silent, so often the page draws: only then can it be stopped."""
_SEED_DIGITS = len(str(_MOST_SEED))
_ANY = "Any text"
_STRUCTURED: Mapping[str, tuple[str, str]] = {
    _ANY: ("", ""),
    "JSON of a schema": (
        "json",
        '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
    ),
    "Any JSON object": ("json_object", ""),
    "Regular expression": ("regex", "[a-z]+ = [0-9]+"),
    "One of several, a line each": ("choice", "yes\nno"),
    "Grammar (EBNF)": ("grammar", 'root ::= "yes" | "no"'),
}
"""What the answer has to be, by what it is called here: the field of `structured_outputs`, and an example."""
_IMAGE_TYPES = ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"]
_MOST_MIB = 32
"""Of an image; the server rejects larger ones."""
_IMAGE_WIDTH = 320
"""As it is shown, in pixels."""


class Turn(NamedTuple):
    """A message of a chat."""

    role: str
    """`user` or `assistant`."""
    text: str
    images: Sequence[tuple[str, bytes]] = ()
    """Files: names and contents."""

    def message(self) -> dict[str, Any]:
        """As a request has it: the server's chat template has places for the images."""
        parts = [*({"type": "image"} for _ in self.images), {"type": "text", "text": self.text}]
        return {"role": self.role, "content": parts if self.images else self.text}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """One request."""

    server: str
    model: str
    prompt: str | list[dict[str, Any]]
    images: Sequence[tuple[str, bytes]] = ()
    """Files: names and contents."""
    sampling: Mapping[str, Any]
    parameters: Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class _Answer:
    """What has arrived of the answer to a request."""

    asked: _Asked
    text: str = ""
    last: Chunk | None = None
    error: str = ""
    has_ended: bool = False


def show() -> None:
    """Draw the page."""
    st.title("Playground")
    model = frame.model_or_reason()
    if not model:
        return
    with st.expander("Sampling", expanded=False):
        try:
            sampling, parameters = _sampling()
        except ValueError as error:
            st.error(words.as_text(str(error)))
            return
    opens = "Chat" if _says(Client.has_chat_template, model) else "Completion"
    completion, chat = st.tabs(["Completion", "Chat"], default=opens)
    with completion:
        _completion(model, sampling, parameters)
    with chat:
        _chat(model, sampling, parameters)


def _says(ask: Callable[[Client, str], bool], model: str) -> bool:
    """What the server says of the model; asked once per visitor. False: it does not say."""
    known: dict[tuple[str, str, str], bool] = st.session_state.setdefault("said_of_models", {})
    which = (ask.__name__, choice.selection().server, model)
    if which not in known:
        try:
            known[which] = ask(watchers.monitor().client, model)
        except ClientError:
            return False
    return known[which]


def _sampling() -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling parameters, and the other parameters of a request.

    Raises:
        ValueError: one cannot be sent.
    """
    first, second, third, fourth = st.columns(4)
    max_tokens = first.number_input("Most tokens", 1, 8192, 128, key="max_tokens")
    temperature = second.number_input("Temperature", 0.0, 2.0, 0.0, step=0.1, key="temperature")
    slo_class = slo_class_picker(third, "playground_slo")
    seed = fourth.text_input("Seed", "", key="seed", help="Empty: none.")
    left, right = st.columns(2)
    stop = left.text_area("Stop at", "", key="stop", height=100,
                          help="Strings, a line each, that end the answer; \\n stands for a new line.")  # fmt: skip
    kind = right.selectbox("The answer has to be", list(_STRUCTURED), key="structured")
    sampling: dict[str, Any] = {"max_tokens": int(max_tokens), "temperature": float(temperature)}
    if seed:
        if not seed.isdecimal() or len(seed) > _SEED_DIGITS or int(seed) > _MOST_SEED:
            raise ValueError(f"The seed is {seed[:40]!r}; it must be a whole number from 0 to {_MOST_SEED}.")
        sampling["seed"] = int(seed)
    if stops := [line.replace("\\n", "\n") for line in stop.splitlines() if line]:
        sampling["stop"] = stops
    name, example = _STRUCTURED[kind]
    if name:
        text = right.text_area("Which", example, key=f"structured_{name}", height=100) if example else ""
        sampling["structured_outputs"] = {name: _constraint(name, text)}
    return sampling, {"slo_class": slo_class} if slo_class else {}


def _constraint(name: str, text: str) -> Any:
    """The value of a field of `structured_outputs`.

    Raises:
        ValueError: it is not one.
    """
    if name == "json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"The schema is not JSON: {error}.") from None
    if name == "choice":
        return [line for line in text.splitlines() if line]
    return True if name == "json_object" else text


def _completion(model: str, sampling: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    with st.form("completion_form"):
        prompt = st.text_area("Prompt", "def fib(", height=120, key="prompt")
        sent = st.form_submit_button("Generate", type="primary")
    server = choice.selection().server
    if sent and prompt:
        asked = _Asked(server=server, model=model, prompt=prompt, sampling=sampling, parameters=parameters)
        answer = st.session_state["completion"] = _Answer(asked=asked)
        _stream(answer)
    elif "completion" in st.session_state:
        answer = st.session_state["completion"]
        if (answer.asked.server, answer.asked.model) != (server, model):
            return
        st.text(answer.text)
        _result(answer)
    else:
        return
    _elsewhere(answer.asked)


def _chat(model: str, sampling: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    turns: list[Turn] = st.session_state.setdefault("turns", [])
    _keep(turns)
    if st.button("New chat", disabled=not turns):
        turns.clear()
        st.rerun()
    conversation = st.container()
    uploader = st.empty() if _says(Client.takes_images, model) else None
    images = _uploaded(uploader, turns)
    text = st.chat_input("Your message", key="said")
    with conversation:
        for turn in turns:
            _show_turn(turn)
        if not text:
            return
        question = Turn("user", text, images)
        said = [*turns, question]
        _show_turn(question)
        asked = _Asked(
            server=choice.selection().server, model=model, prompt=[turn.message() for turn in said], sampling=sampling,
            parameters=parameters, images=[image for turn in said for image in turn.images],
        )  # fmt: skip
        answer = _Answer(asked=asked)
        st.session_state["answering"] = (question, answer)
        with st.chat_message("assistant"):
            _stream(answer)
    _keep(turns)
    if images and not answer.error:
        _uploaded(uploader, turns)
    _elsewhere(asked)


def _uploaded(place: DeltaGenerator | None, turns: Sequence[Turn]) -> Sequence[tuple[str, bytes]]:
    """Files for the next question: names and contents. A question that is kept leaves an empty uploader."""
    if place is None:
        return ()
    files = place.file_uploader("Images for the next message", _IMAGE_TYPES, accept_multiple_files=True,
                                key=f"images_{len(turns)}", max_upload_size=_MOST_MIB)  # fmt: skip
    return [(file.name, file.getvalue()) for file in files]


def _show_turn(turn: Turn) -> None:
    with st.chat_message(turn.role):
        for name, content in turn.images:
            _show_image(name, content)
        st.text(turn.text) if turn.text else st.caption("No text.")


def _show_image(name: str, content: bytes) -> None:
    try:
        st.image(content, width=_IMAGE_WIDTH, alt=name)
    except Exception:  # Pillow raises many kinds; the server says what is wrong with the file
        st.caption(words.as_text(f"{name} cannot be shown."))


def _keep(turns: list[Turn]) -> None:
    """Add the last question and its answer to the chat: a stopped one, too, even without text, but not a rejected one.

    Streamlit begins the next run before a stopped one has ended, so that the next run has to add the answer.
    """
    question, answer = st.session_state.pop("answering", (None, None))
    if answer is not None and not answer.error:
        turns.extend((question, Turn("assistant", answer.text)))


def _stream(answer: _Answer) -> None:
    """Show the text as it arrives, then its timings.

    Any click, on Stop or elsewhere, ends this run of the script where it draws next, and with it the request.
    """
    place, stop = st.empty(), st.empty()
    stop.button("Stop", icon=":material/stop_circle:", key="stop_answer")
    asked = answer.asked
    options = {**asked.sampling, "parameters": asked.parameters, "timeout": _TIMEOUT_S,
               "images": [content for _, content in asked.images]}  # fmt: skip
    try:
        with closing(watchers.monitor().client.stream(asked.model, asked.prompt, beat=_BEAT_S, **options)) as chunks:
            for chunk in chunks:
                answer.text += chunk.text
                answer.last = chunk
                place.text(answer.text)
    except ClientError as error:
        answer.error = str(error)
    answer.has_ended = True
    stop.empty()
    _result(answer)


def _result(answer: _Answer) -> None:
    if answer.error:
        st.error(words.as_text(answer.error))
    elif not answer.has_ended:
        st.caption("Stopped.")
    else:
        _timings(answer.last)


def _elsewhere(asked: _Asked) -> None:
    """The request as a command and as a program."""
    what = (asked.model, asked.prompt, asked.sampling, asked.parameters)
    names = [name for name, _ in asked.images]
    with st.expander("The same request by curl, and from Python"):
        command = snippets.curl(watchers.monitors()[asked.server].settings.http, *what, image_names=names)
        st.code(command, language="bash", wrap_lines=True)
        st.code(snippets.python(asked.server, *what, image_names=names), language="python")


_TIMINGS = (
    ("Encode", "encode_seconds"), ("Queue", "queue_seconds"), ("TTFT", "time_to_first_token_seconds"),
    ("Prefill", "prefill_seconds"), ("Decode", "decode_seconds"),
    ("Per token", "time_per_output_token_seconds"), ("In all", "e2e_seconds"),
)  # fmt: skip


def _timings(last: Chunk | None) -> None:
    if last is None or not last.metrics:
        return
    metrics = last.metrics
    timings = [(label, metrics.get(name)) for label, name in _TIMINGS if name != "encode_seconds" or metrics.get(name)]
    frame.figures([(label, words.seconds_or_dash(value), "") for label, value in timings])
    verdict = metrics.get("slo_verdict")
    length = metrics.get("acceptance_length")
    st.caption(
        f"{metrics.get('num_prompt_tokens', 0)} prompt tokens, {metrics.get('num_cached_tokens', 0)} of them from the "
        f"cache; {metrics.get('num_output_tokens', 0)} generated; finished by {last.finish_reason or 'the server'}; "
        f"preempted {metrics.get('num_preemptions', 0)} times"
        + (f"; acceptance length {words.decimal(length)}" if length else "")
        + (f"; SLO: {verdict}" if verdict else "")
    )
