"""DecoderOptions: the differences between the layers of families."""

from dataclasses import dataclass

from quire_engine.models.fields import Fields

__all__ = ["DecoderOptions", "refuse_sliding_window"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """The same for all layers; see `models/decoder.py`."""

    qkv_bias: bool = False
    """The projections of queries, keys and values have biases."""
    o_bias: bool = False
    """The output projection of the attention has a bias."""
    mlp_bias: bool = False
    """The linear layers of the feed-forward have biases."""
    qk_norm: bool = False
    """Each head of queries and keys is normed before the rotation, with one weight per head feature."""
    default_head_size: int | None = None
    """Used if `config.json` has no `head_dim`; unset: `hidden_size` divided by the number of heads."""
    windows: tuple[int | None, ...] = ()
    """By layer, how many of its last keys each row sees at most, None if all; empty: all layers see all."""


def refuse_sliding_window(fields: Fields) -> None:
    """Refuse models with sliding window attention.

    Raises:
        CheckpointError: the model uses it.
    """
    if fields.boolean("use_sliding_window", False):
        raise fields.error("use_sliding_window", "false: sliding windows are not served")
