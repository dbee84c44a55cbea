"""Ministral 3 (https://huggingface.co/collections/mistralai/ministral-3): Mistral with YaRN, and with queries that grow
with their position (`llama_4_scaling_beta` of the rotation)."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_equal_windows

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262144}


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    if not fields.inner("rope_parameters").values:
        raise fields.error("rope_parameters", "given")
    return DecoderOptions(windows=read_equal_windows(fields, None))
