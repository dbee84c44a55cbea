"""Model architectures, and the loading of checkpoint folders.

This module does not import torch, so that the frontend can read a checkpoint's configuration without that cost.
"""

from quire_engine.models.checkpoints.config import CheckpointConfig, ServedCheckpoint
from quire_engine.models.served import check_checkpoint, check_folder, check_replacement, read_checkpoint

__all__ = [
    "CheckpointConfig", "ServedCheckpoint", "check_checkpoint", "check_folder", "check_replacement", "read_checkpoint",
]  # fmt: skip
