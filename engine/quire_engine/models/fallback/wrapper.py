"""What is around the text model of a model that takes images, in transformers' own code: its towers, what it gives the
text model, and its head. The text model itself is left out, as our decoder computes it.

Of architectures that we know no more of, this shows that our decoder may: the text model is called once, with the
embeddings of the tokens, of which images replace some, and with causal attention at positions that count; and logits
are the product of its states and the head.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire_engine.errors import CheckpointError, cut
from quire_engine.models.fallback.attention import UnfitModelError

NUM_TOKENS = 9
"""Of the prompt that text is tried with."""
TEXT_MODELS = ("language_model", "text_model")
"""transformers' names of the attribute."""


class TextRecorder(nn.Module):
    """Takes the place of the text model, and keeps what it is called with.

    Args:
        size: of hidden states.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._dtype = size, torch.get_default_dtype()
        self.calls: list[Mapping[str, Any]] = []
        self.hidden: torch.Tensor | None = None
        """What it returned last, [1, T, E]."""

    def get_input_embeddings(self) -> "TextRecorder":
        """What `embed` is called by."""
        return self

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows that differ for most tokens."""
        columns = torch.arange(1, self._size + 1, device=ids.device)
        return torch.sin(ids[..., None].float() % 8191 * columns).to(self._dtype)

    def forward(self, ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        """Embeddings of ids, or the states of the text model."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        if ids is not None:
            return self.embed(ids)
        self.calls.append(arguments)
        self.hidden = torch.cos(arguments["inputs_embeds"])
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


class HeadRecorder(nn.Module):
    """Takes the place of the head, and returns its input."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, E] → […, E]"""
        return hidden * 1.0


def wrapper_class(folder: Path) -> tuple[Any, Any]:
    """transformers' class of a checkpoint without its text model and head, and its configuration.

    Raises:
        CheckpointError: transformers has none.
        UnfitModelError: when it is made, if its text model is not where it is with other models.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind: Any = AutoModelForImageTextToText._model_mapping[type(config)]
    except Exception as error:  # it checks configurations in its own ways
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers has no model for images: {cut(str(error))}"
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it is the text model's; what else is quantised is found missing

    def make(self: Any, config: Any, *arguments: Any, **settings: Any) -> None:
        kind.__init__(self, config, *arguments, **settings)
        inner = getattr(self, "model", None)
        name = next((name for name in TEXT_MODELS if isinstance(getattr(inner, name, None), nn.Module)), None)
        if name is None or not isinstance(getattr(self, "lm_head", None), nn.Module):
            raise UnfitModelError("has no text model and head of the usual names")
        self.recorder = TextRecorder(config.get_text_config().hidden_size)
        setattr(inner, name, self.recorder)
        self.lm_head = HeadRecorder()
        self.all_tied_weights_keys = {}

    names = {
        "__init__": make, "__module__": kind.__module__, "_tied_weights_keys": {},
        "_keys_to_ignore_on_load_unexpected": [""],  # those of the text model, which would be listed in the log
    }  # fmt: skip
    return type(kind.__name__, (kind,), names), config


def run(model: Any, ids: torch.Tensor, state_ids: Sequence[int], arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rows that the text model is given for some tokens of a prompt, [n, E].

    Args:
        model: of a `wrapper_class`.
        ids: of the prompt, [T].
        state_ids: the tokens whose rows images replace, and no others.
        arrays: of the image.

    Raises:
        UnfitModelError: our decoder would compute something else.
    """
    if hasattr(model.model, "get_rope_index"):
        raise UnfitModelError("has positions of several dimensions")
    recorder, parameters = model.recorder, inspect.signature(model.forward).parameters
    recorder.calls.clear()
    # Some models have attention or positions by the type of tokens.
    of_images = torch.isin(ids, torch.tensor(state_ids, dtype=ids.dtype, device=ids.device))
    types = of_images.int()[None]
    given = {**arrays, **dict.fromkeys(("mm_token_type_ids", "token_type_ids"), types)}
    given = {name: value for name, value in given.items() if name in parameters}
    logits = model(input_ids=ids[None], use_cache=False, **given).logits
    if len(recorder.calls) != 1:
        raise UnfitModelError(f"calls its text model {len(recorder.calls)} times")
    call = dict(recorder.calls[0])
    rows: torch.Tensor = call.pop("inputs_embeds")
    if rows.shape[:2] != (1, len(ids)):
        raise UnfitModelError(f"gives its text model {list(rows.shape[:2])} rows for {len(ids)} tokens")
    for name, value in call.items():
        counts = name in ("position_ids", "cache_position") and isinstance(value, torch.Tensor)
        if counts and bool((value == torch.arange(len(ids), device=value.device)).all()):
            continue
        if value is not None and not isinstance(value, bool | int | float | str):
            raise UnfitModelError(f"gives its text model {name} of its own")
    if bool(((rows[0] != recorder.embed(ids)).any(-1) & ~of_images).any()):
        raise UnfitModelError("gives its text model other rows than embeddings of tokens and states of images")
    if not torch.equal(logits.to(recorder.hidden.dtype), recorder.hidden):
        raise UnfitModelError("computes more of its logits than a head does")
    return rows[0, of_images]


def check_text(folder: Path) -> None:
    """Check that our decoder computes what a checkpoint's model computes of text.

    Raises:
        CheckpointError: it does not, or transformers has no such model.
    """
    kind, config = wrapper_class(folder)
    try:
        with torch.device("meta"):
            model = kind(config).eval()
        with torch.inference_mode():
            run(model, torch.arange(5, 5 + NUM_TOKENS), (), {})
    except Exception as error:  # any of transformers' code
        reason = str(error) if isinstance(error, UnfitModelError) else f"cannot be tried: {cut(str(error))}"
        raise CheckpointError(f"{folder / 'config.json'}: {kind.__name__} {reason}") from error
