"""`prompt_embeds` of a body: base64 of files with one tensor each → their rows."""

import numpy as np
import numpy.typing as npt
from quire_engine.frontend.tensor_files import read_tensor

from quire_gateway.errors import InvalidRequestError

_NAME = "prompt_embeds"


def read_prompt_embeds(value: object, max_prompts: int) -> list[npt.NDArray[np.float32]]:
    """The tensors of a field `prompt_embeds`, [tokens, hidden_size] each. The model checks their size and values.

    Args:
        value: the field's: a string, or a list of strings.
        max_prompts: upper bound on their number.

    Raises:
        InvalidRequestError: one is not base64, or no file of a plain tensor of floats with two dimensions.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(_NAME, f"{_NAME} must be a string of base64, or a list of such strings")
    if len(texts) > max_prompts:
        raise InvalidRequestError(_NAME, f"{_NAME} holds {len(texts)} prompts; at most {max_prompts} are taken")
    return [_rows_of(text) for text in texts]


def _rows_of(text: str) -> npt.NDArray[np.float32]:
    try:
        rows = read_tensor(text)
    except ValueError as error:
        raise InvalidRequestError(_NAME, f"{_NAME}: {error}") from None
    if rows.dtype != np.float32:
        raise InvalidRequestError(_NAME, f"{_NAME}: the tensor is of {rows.dtype}; it must be of floats")
    if len(rows.shape) == 3 and rows.shape[0] == 1:
        rows = rows[0]
    if len(rows.shape) != 2 or min(rows.shape) < 1:
        raise InvalidRequestError(_NAME, f"{_NAME} has shape {[*rows.shape]}; it must be [tokens, hidden_size]")
    return rows.astype(np.float32, copy=False)
