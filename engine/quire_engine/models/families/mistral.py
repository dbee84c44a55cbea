"""Mistral (https://arxiv.org/abs/2310.06825, section 2): Llama, in some versions with a window in every layer."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_equal_windows

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    return DecoderOptions(windows=read_equal_windows(fields, 4096))
