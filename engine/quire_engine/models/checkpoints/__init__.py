"""The file formats of checkpoints. Does not use torch until a tensor is read."""

from pathlib import Path

from quire_engine.models.checkpoints.base import FLOATING, INDICES, CheckpointReader, StoredTensor
from quire_engine.models.checkpoints.safetensors import SafetensorsReader, weight_files

__all__ = ["FLOATING", "INDICES", "CheckpointReader", "StoredTensor", "open_checkpoint", "weight_files"]


def open_checkpoint(folder: Path) -> CheckpointReader:
    """Open the files of a checkpoint.

    Args:
        folder: the checkpoint; today always of safetensors files.
    """
    return SafetensorsReader(folder)
