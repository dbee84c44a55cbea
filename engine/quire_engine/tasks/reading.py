"""What a checkpoint offers besides generation: its `PoolingInfo`. Does not use torch."""

from pathlib import Path

from quire_engine.models.checkpoints.config import ServedCheckpoint
from quire_engine.pooling import PoolingInfo


def read_pooling_info(folder: Path, checkpoint: ServedCheckpoint) -> PoolingInfo:
    """Read what a checkpoint's folder says of pooling.

    Args:
        folder: the checkpoint, or its GGUF file.
        checkpoint: its configuration.

    Raises:
        CheckpointError: a file is malformed, or says what cannot be done.
    """
    return PoolingInfo(embedding_size=checkpoint.hidden_size, can_generate=checkpoint.is_causal)
