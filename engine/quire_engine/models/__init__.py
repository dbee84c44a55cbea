"""Model architectures, and the loading of checkpoint folders.

This module does not import torch, so that the frontend can read a checkpoint's configuration without that cost.
"""

from quire_engine.models.check import check_checkpoint, check_folder
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.rope_config import RopeConfig
from quire_engine.models.served import ServedCheckpoint, read_checkpoint

__all__ = ["CheckpointConfig", "RopeConfig", "ServedCheckpoint", "check_checkpoint", "check_folder", "read_checkpoint"]
