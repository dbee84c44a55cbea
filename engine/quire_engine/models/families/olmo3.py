"""OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with a window in three of four layers, which do not scale the
rotation."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import POST_NORMS, DecoderOptions
from quire_engine.models.windows import read_window, read_window_rope_theta, read_windows

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(
        qkv_bias=bias,
        o_bias=bias,
        qk_projection_norm=True,
        norms=POST_NORMS,
        float32_norms=True,
        windows=read_windows(fields, read_window(fields, 4096), lambda i: (i + 1) % 4 != 0),
        window_rope_theta=read_window_rope_theta(fields, "rope_theta", 500000.0),
    )
