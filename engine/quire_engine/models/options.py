"""DecoderOptions: in what the layers of families differ."""

from dataclasses import dataclass

from quire_engine.models.fields import Fields

__all__ = ["DecoderOptions", "refuse_sliding_window"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """Of all layers alike; see `models/decoder.py`."""

    qkv_bias: bool = False
    """Queries, keys and values have biases."""
    o_bias: bool = False
    """So has the projection of the heads' outputs."""
    mlp_bias: bool = False
    """And so have the linear layers of the feed-forward."""
    qk_norm: bool = False
    """Each head of queries and keys is normed before the rotation, with one weight per head feature."""
    default_head_size: int | None = None
    """Where `config.json` has no `head_dim`; unset: `hidden_size` by the number of heads."""


def refuse_sliding_window(fields: Fields) -> None:
    """Raise where some layers attend to the latest tokens alone.

    Raises:
        CheckpointError: they do.
    """
    if fields.boolean("use_sliding_window", False):
        raise fields.error("use_sliding_window", "false: sliding windows are not served")
