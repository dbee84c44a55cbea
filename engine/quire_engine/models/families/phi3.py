"""Phi-3, Phi-3.5 and Phi-4 (https://arxiv.org/abs/2404.14219, section 2): Llama, with projections that are fused in its
checkpoints, LongRoPE, and in Phi-4-mini (https://arxiv.org/abs/2503.01743) partial rotary."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_equal_windows

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    return DecoderOptions(
        fused=(("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))),
        windows=read_equal_windows(fields, None),
    )
