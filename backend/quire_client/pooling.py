"""Requests for a vector per prompt instead of text: embeddings, scores and classes, many prompts at once.

::

    text_input [N] or input_ids with input_lengths [N]; text_pair [N]     pooling_parameters: JSON
                                  │
                                  ▼
    embeddings or scores, FP32 [rows, D]     num_input_tokens [N]     num_rows [N] of tasks per token     labels [D]
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire_client.errors import ClientError, InvalidArgument
from quire_client.messages import Value, contents_of, infer_request, numbers_in, texts_in

Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]
"""A text or several, or the token ids of one prompt or of several; or a conversation, an object with `messages`."""
VECTOR_OUTPUTS = ("embeddings", "scores")


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to such a request."""

    data: npt.NDArray[np.float32]
    """[rows, D]: a row per prompt, in order; of a task per token, the rows of the first prompt, then of the next."""
    num_prompt_tokens: list[int] = []
    """One per prompt that was computed."""
    num_rows: list[int] = []
    """One per prompt, with a task per token; else empty."""
    labels: list[str] = []
    """The columns' names, if these are classes that have names."""

    def by_prompt(self) -> list[npt.NDArray[np.float32]]:
        """For each prompt [D], or [rows, D] with a task per token."""
        if not self.num_rows:
            return list(self.data)
        return np.split(self.data, np.cumsum(self.num_rows)[:-1])


def pooling_request(
    model: str, task: str, texts: Texts, pairs: str | Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None, request_id: str = "",
) -> Any:  # fmt: skip
    """A request.

    Args:
        model: its name.
        task: `embed`, `score`, `classify` or another that the model offers; empty: the model's own.
        texts: the prompts.
        pairs: of a score, what each is compared with; one of the two may be a single text.
        parameters: `dimensions`, `normalize` and others; None counts as left out.
        request_id: the client's name for it.

    Raises:
        InvalidArgument: there are no texts, or no pairs.
    """
    inputs: dict[str, Value] = _prompts(texts)
    if pairs is not None:
        inputs["text_pair"] = [pairs] if isinstance(pairs, str) else list(pairs)
    if [] in inputs.values():
        raise InvalidArgument("there is no text; give at least one")
    said = {"task": task or None, **(parameters or {})}
    said = {name: value for name, value in said.items() if value is not None}
    inputs["pooling_parameters"] = json.dumps(said, ensure_ascii=False)
    return infer_request(model, {**inputs, "return_num_input_tokens": True}, None, request_id)


def pooled_of(response: Any) -> Pooled | None:
    """What a response says; None if it has no vectors.

    Raises:
        ClientError: they are malformed.
    """
    shapes = {output.name: output.shape for output in response.outputs if output.name in VECTOR_OUTPUTS}
    try:
        contents = contents_of(response) if shapes else {}
        for name, shape in shapes.items():
            return Pooled(
                data=np.frombuffer(contents[name], "<f4").reshape([int(size) for size in shape]),
                num_prompt_tokens=numbers_in(contents.get("num_input_tokens", b"")),
                num_rows=numbers_in(contents.get("num_rows", b"")),
                labels=texts_in(contents.get("labels", b"")),
            )
    except (ValueError, struct.error):
        raise ClientError("the answer's vectors are malformed; is it a model of Quire, of this version?") from None
    return None


def _prompts(texts: Texts) -> dict[str, Value]:
    if isinstance(texts, str):
        return {"text_input": [texts]}
    if isinstance(texts, Mapping):
        return {"messages": json.dumps(texts, ensure_ascii=False)}
    prompts: Any = [texts] if texts and isinstance(texts[0], int) else texts
    if all(isinstance(prompt, str) for prompt in prompts):
        return {"text_input": list(prompts)}
    ids = [token_id for prompt in prompts for token_id in prompt]
    return {"input_ids": ids, "input_lengths": [len(prompt) for prompt in prompts]}
