"""Model architectures, and the loading of checkpoint folders.

This module does not import torch, so that the frontend can read a checkpoint's configuration without that cost.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_engine.models.checkpoints.config import CheckpointConfig, ServedCheckpoint
    from quire_engine.models.served import check_checkpoint, check_folder, check_replacement, read_checkpoint

__all__ = [
    "CheckpointConfig", "ServedCheckpoint", "check_checkpoint", "check_folder", "check_replacement", "read_checkpoint",
]  # fmt: skip

_HOMES = {
    "CheckpointConfig": "quire_engine.models.checkpoints.config",
    "ServedCheckpoint": "quire_engine.models.checkpoints.config",
    **dict.fromkeys(
        ("check_checkpoint", "check_folder", "check_replacement", "read_checkpoint"), "quire_engine.models.served"
    ),
}


def __getattr__(name: str) -> Any:
    """Import on first use: a process that loads a tokenizer needs the readers of files, and no family of models."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
