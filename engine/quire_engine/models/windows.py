"""Reads which layers attend to a sliding window (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150)."""

from collections.abc import Callable

from quire_engine.models.fields import MAX_LAYERS, MAX_POSITIONS, Fields
from quire_engine.models.rope_config import RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"
"""In `layer_types`."""


def read_window(fields: Fields, default: int | None) -> int | None:
    """The size of the window.

    Args:
        fields: of `config.json`.
        default: if the field is missing, which is not the same as null.

    Returns:
        How many of its last keys each row sees at most, in layers with a window; None if there are no such layers.

    Raises:
        CheckpointError: it is no integer above 0.
    """
    if "sliding_window" not in fields.values:
        return default
    return None if fields.values["sliding_window"] is None else fields.integer("sliding_window", 1, MAX_POSITIONS)


def read_windows(fields: Fields, window: int | None, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The windows of the layers.

    Args:
        fields: of `config.json`.
        window: the size.
        is_sliding: whether a layer has a window, by its number, if the field `layer_types` is missing.

    Returns:
        By layer, how many of its last keys each row sees at most; None: all.

    Raises:
        CheckpointError: `layer_types` does not name one of the two types for each layer, or some layer has a window
            and there is no size.
    """
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = fields.values.get("layer_types")
    if types is None:
        types = [SLIDING if window is not None and is_sliding(i) else FULL for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(one in (FULL, SLIDING) for one in types):
        raise fields.error("layer_types", f"{FULL} or {SLIDING} for each of {num_layers} layers")
    if window is None and SLIDING in types:
        raise fields.error("sliding_window", f"above 0 and in use, as layer_types names {SLIDING}")
    return tuple(window if one == SLIDING else None for one in types)


def read_qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Those of Qwen2 and Qwen3: the first `max_window_layers` layers see everything.

    Raises:
        CheckpointError: see `read_windows`.
    """
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
    window = read_window(fields, 4096) if fields.boolean("use_sliding_window", False) else None
    return read_windows(fields, window, lambda i: i >= first)


def read_window_rope(fields: Fields, name: str, default: float) -> RopeConfig:
    """The rotation in layers with a window, of families that have two; it is not scaled.

    Args:
        fields: of `config.json`.
        name: of its base in files without `rope_parameters` of its own.
        default: the base, if both are missing.

    Raises:
        CheckpointError: the base is no number above 0, or these layers scale the rotation.
    """
    rope = fields.inner("rope_parameters").inner(SLIDING)
    rope.choice("rope_type", ("default",), "default")
    return RopeConfig(rope_theta=rope.positive("rope_theta", fields.positive(name, default)))
