"""Model architectures, and the loading of checkpoint folders.

This module does not import torch, so that the frontend can read a checkpoint's configuration without that cost.
"""

from quire_engine.models.checkpoint import CheckpointConfig, RopeConfig
from quire_engine.models.weights import check_checkpoint

__all__ = ["CheckpointConfig", "RopeConfig", "check_checkpoint"]
