"""Checks the checkpoint of a model that drafts for another, without loading it."""

from pathlib import Path

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.fields import read_config
from quire_engine.models.registry import EAGLE3_ARCHITECTURES
from quire_engine.models.served import ServedCheckpoint

__all__ = ["check_draft_checkpoint", "draft_target", "read_draft_model"]

_METHODS = {"MedusaModel": "medusa", **dict.fromkeys(EAGLE3_ARCHITECTURES, "eagle3")}
"""Architectures of what drafts by another method."""


def check_draft_checkpoint(method: str, folder: Path, target: CheckpointConfig) -> None:
    """Check everything that can be checked without loading.

    Args:
        method: `draft_model`, `eagle3` or `medusa`.
        folder: its checkpoint.
        target: the model that it drafts for.

    Raises:
        CheckpointError: something is missing, truncated or of the wrong shape, or does not fit the target.
    """
    # These import torch.
    from quire_engine.models.eagle3 import Eagle3Checkpoint
    from quire_engine.models.loader import check_weights
    from quire_engine.models.medusa import MedusaCheckpoint

    if method == "medusa":
        MedusaCheckpoint.from_folder(folder, target)
    elif method == "eagle3":
        Eagle3Checkpoint.from_folder(folder, target)
    else:
        check_weights(folder, read_draft_model(folder, target))


def draft_target(target: ServedCheckpoint, method: str) -> CheckpointConfig:
    """The configuration of a model that another one can draft for.

    Raises:
        CheckpointError: transformers' code computes it.
    """
    if not isinstance(target, CheckpointConfig):
        raise CheckpointError(
            f"speculative_config: method is {method!r}; {target.architecture} runs with transformers' own code, for "
            "which only the methods ngram and suffix draft"
        )
    return target


def read_draft_model(folder: Path, target: CheckpointConfig) -> CheckpointConfig:
    """The configuration of a draft model.

    Raises:
        CheckpointError: it describes no model that can be served, or one with another vocabulary.
    """
    kind = _METHODS.get(str((read_config(folder, "speculative_config: model").values.get("architectures") or [""])[0]))
    if kind is not None:
        raise CheckpointError(f"{folder / 'config.json'}: that is no draft model; set method to {kind!r}")
    config = CheckpointConfig.from_folder(folder)
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{folder / 'config.json'}: vocab_size is {config.vocab_size}; a model that drafts must have the "
            f"vocabulary of the one that it drafts for, which has {target.vocab_size} tokens"
        )
    return config
