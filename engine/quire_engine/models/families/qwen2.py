"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671, section 2.2): Llama with biases of queries, keys and values."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_qwen_windows

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    return DecoderOptions(qkv_bias=True, windows=read_qwen_windows(fields))
