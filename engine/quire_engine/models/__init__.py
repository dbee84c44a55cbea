"""Model architectures, and how a checkpoint folder becomes one.

This module stays free of torch: the frontend reads a checkpoint's configuration without paying for the import.
"""

from quire_engine.models.checkpoint import CheckpointConfig, RopeConfig
from quire_engine.models.weights import check_checkpoint

__all__ = ["CheckpointConfig", "RopeConfig", "check_checkpoint"]
