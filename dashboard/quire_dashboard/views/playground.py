"""The playground page: a streamed completion or chat, with the request's timings."""

from collections.abc import Generator, Iterator
from typing import Any

import streamlit as st

from quire_dashboard import words
from quire_dashboard.chat import FORMATS, STOPS, chat_prompt
from quire_dashboard.frame import figures, model_or_reason, monitor, selection
from quire_dashboard.triton_client import Chunk, TritonError

__all__ = ["show"]

_MOST_SEED = 2**63 - 1
"""Triton's integer request parameters are int64."""
_SEED_DIGITS = len(str(_MOST_SEED))


def show() -> None:
    """Draw the page."""
    st.title("Playground")
    model = model_or_reason()
    if not model:
        return
    with st.expander("Sampling", expanded=False):
        first, second, third, fourth = st.columns(4)
        max_tokens = first.number_input("Most tokens", 1, 8192, 128, key="max_tokens")
        temperature = second.number_input("Temperature", 0.0, 2.0, 0.0, step=0.1, key="temperature")
        slo_class = third.text_input("SLO class", "", key="playground_slo", help="Empty: the model's default.")
        seed = fourth.text_input("Seed", "", key="seed", help="Empty: none.")
    parameters: dict[str, Any] = {"max_tokens": int(max_tokens), "temperature": float(temperature)}
    if slo_class:
        parameters["slo_class"] = slo_class
    if seed:
        if not seed.isdecimal() or len(seed) > _SEED_DIGITS or int(seed) > _MOST_SEED:
            st.error(f"The seed is {words.as_code(repr(seed[:40]))}; it must be a whole number from 0 to {_MOST_SEED}.")
            return
        parameters["seed"] = int(seed)
    completion, chat = st.tabs(["Completion", "Chat"])
    with completion:
        _completion(model, parameters)
    with chat:
        _chat(model, parameters)


def _completion(model: str, parameters: dict[str, Any]) -> None:
    with st.form("completion_form"):
        prompt = st.text_area("Prompt", "def fib(", height=120, key="prompt")
        sent = st.form_submit_button("Generate", type="primary")
    asked = (selection().server, model)
    if sent and prompt:
        st.session_state["completion"] = (asked, *_stream(model, prompt, parameters))
    elif "completion" in st.session_state:
        answered, text, last = st.session_state["completion"]
        if answered != asked:
            return
        st.text(text)
        _timings(last)


def _chat(model: str, parameters: dict[str, Any]) -> None:
    turns: list[tuple[str, str]] = st.session_state.setdefault("turns", [])
    first, second = st.columns([3, 1], vertical_alignment="bottom")
    format_ = first.selectbox("Format of the prompt", list(FORMATS), key="chat_format",
                              help="Over gRPC the model gets plain text: choose what it was trained on.")  # fmt: skip
    if second.button("New chat", disabled=not turns):
        turns.clear()
        st.rerun()
    for role, text in turns:
        with st.chat_message(role):
            st.text(text)
    with st.form("chat_form", clear_on_submit=True):
        said = st.text_input("Your message", key="said")
        sent = st.form_submit_button("Send", type="primary")
    if not sent or not said:
        return
    turns.append(("user", said))
    with st.chat_message("user"):
        st.text(said)
    with st.chat_message("assistant"):
        # Stop strings are a list, and request parameters cannot be lists: cut the text and close the stream here.
        text, _ = _stream(model, chat_prompt(turns, format_), parameters, stop=STOPS[format_])
    turns.append(("assistant", text))


def _stream(model: str, prompt: str, parameters: dict[str, Any], stop: str = "") -> tuple[str, Chunk | None]:
    """Show the text as it arrives, then its timings."""
    place = st.empty()
    text, last = "", None
    chunks = monitor().triton.generate(model, prompt, parameters)
    try:
        for chunk in _until(chunks, stop):
            text += chunk.text
            last = chunk
            place.text(text)
    except TritonError as error:
        st.error(words.as_text(str(error)))
        return text, None
    text = text.split(stop)[0] if stop else text
    place.text(text)
    _timings(last)
    return text, last


def _until(chunks: Generator[Chunk, None, None], stop: str) -> Iterator[Chunk]:
    text = ""
    try:
        for chunk in chunks:
            yield chunk
            text += chunk.text
            if stop and stop in text:
                return
    finally:
        chunks.close()


_TIMINGS = (
    ("Queue", "queue_seconds"), ("TTFT", "time_to_first_token_seconds"), ("Prefill", "prefill_seconds"),
    ("Decode", "decode_seconds"), ("Per token", "time_per_output_token_seconds"), ("In all", "e2e_seconds"),
)  # fmt: skip


def _timings(last: Chunk | None) -> None:
    if last is None or not last.metrics:
        return
    metrics = last.metrics
    figures([(label, words.seconds_or_dash(metrics.get(name)), "") for label, name in _TIMINGS])
    verdict = metrics.get("slo_verdict")
    length = metrics.get("acceptance_length")
    st.caption(
        f"{metrics.get('num_prompt_tokens', 0)} prompt tokens, {metrics.get('num_cached_tokens', 0)} of them from the "
        f"cache; {metrics.get('num_output_tokens', 0)} generated; finished by {last.finish_reason or 'the server'}; "
        f"preempted {metrics.get('num_preemptions', 0)} times"
        + (f"; acceptance length {words.decimal(length)}" if length else "")
        + (f"; SLO: {verdict}" if verdict else "")
    )
