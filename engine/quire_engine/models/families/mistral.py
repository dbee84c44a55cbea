"""Mistral (https://arxiv.org/abs/2310.06825, section 2): Llama, in some versions with a window in every layer."""

from quire_engine.models.fields import MAX_LAYERS, Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_window

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    window = read_window(fields, 4096)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    return DecoderOptions(windows=() if window is None else (window,) * num_layers)
