"""The file formats of checkpoints. Does not use torch until a tensor is read."""

from pathlib import Path

from quire_engine.models.checkpoints.base import FLOATING, INDICES, CheckpointReader, StoredTensor
from quire_engine.models.checkpoints.safetensors import SafetensorsReader, weight_files

__all__ = ["FLOATING", "INDICES", "CheckpointReader", "StoredTensor", "open_checkpoint", "weight_files"]


def open_checkpoint(folder: Path) -> CheckpointReader:
    """The reader of a checkpoint's folder, by its file format; no file is opened yet."""
    return SafetensorsReader(folder)
