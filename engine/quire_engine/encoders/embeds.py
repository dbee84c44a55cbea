"""Images whose hidden states are given, `image_embeds` as in vLLM: no tower computes them."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire_engine.errors import RequestError, quote

ROWS = "image_embeds"


@dataclass(frozen=True, slots=True, eq=False)
class ImageEmbeds:
    """The hidden states of an image."""

    rows: npt.NDArray[np.float32]
    """[tokens, E]"""
    sizes: Mapping[str, npt.NDArray[np.int64]]
    """What the image processor says of the image's size, by its names, [1, n] each."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its states."""
        return self.rows.nbytes

    @property
    def text(self) -> str:
        """Its tensors as JSON, as the input `image` takes them: of each the name, and a file in base64."""
        from safetensors.numpy import save

        tensors: dict[str, npt.NDArray[Any]] = {ROWS: self.rows, **self.sizes}
        files = {name: base64.b64encode(save({name: tensor})).decode() for name, tensor in tensors.items()}
        return msgspec.json.encode(files).decode()


def read_embeds(given: Any) -> ImageEmbeds:
    """The states of one image.

    Args:
        given: a torch tensor or array of floats [tokens, E], or with further dimensions before; or `image_embeds` of
            this kind, and beside them integers by their names, such as `image_grid_thw`.

    Raises:
        RequestError: it is nothing of this.
    """
    if isinstance(given, ImageEmbeds):
        return given
    found = dict(given) if isinstance(given, Mapping) else {ROWS: given}
    rows = found.pop(ROWS, None)
    shape = tuple(getattr(rows, "shape", ()))
    if len(shape) < 2 or min(shape) < 1:
        what = f"has shape {[*shape]}" if hasattr(rows, "shape") else f"is {type(rows).__name__}"
        raise RequestError.because(
            "multi_modal_data", f"{ROWS} {what}; it must be a tensor of shape [tokens, hidden_size]"
        )
    return ImageEmbeds(
        float_rows(ROWS, rows).reshape(-1, shape[-1]), {name: _integers(name, value) for name, value in found.items()}
    )


def float_rows(name: str, tensor: Any) -> npt.NDArray[np.float32]:
    """A torch tensor or array of finite floats, on the host.

    Args:
        name: of the parameter.
        tensor: of any shape.

    Raises:
        RequestError: its numbers are no floats, or not finite.
    """
    if hasattr(tensor, "detach"):
        is_float = tensor.is_floating_point()
        tensor = tensor.detach().float().cpu().numpy() if is_float else tensor
    else:
        tensor = np.asarray(tensor)
        is_float = tensor.dtype.kind == "f"
    if not is_float:
        raise RequestError.of(name, f"has dtype {tensor.dtype}; it must be one of floating point")
    with np.errstate(over="ignore"):
        rows: npt.NDArray[np.float32] = np.ascontiguousarray(tensor, dtype="<f4")
    if not np.isfinite(rows).all():
        raise RequestError.of(name, "holds values that are not finite float32 numbers")
    return rows


def _integers(name: Any, value: Any) -> npt.NDArray[np.int64]:
    try:
        found = np.atleast_2d(np.asarray(value.cpu() if hasattr(value, "cpu") else value))
        is_row = found.dtype.kind in "iu" and found.ndim == 2 and len(found) == 1
    except (OverflowError, ValueError):
        is_row = False
    if not is_row or not isinstance(name, str):
        what = f"{quote(name)} is {quote(value)} beside {ROWS}; it must be the integers of one image"
        raise RequestError.because("multi_modal_data", what)
    numbers: npt.NDArray[np.int64] = found.astype(np.int64)
    return numbers
