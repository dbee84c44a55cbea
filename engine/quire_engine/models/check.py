"""Checks what is to be served before anything is loaded."""

from pathlib import Path

from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.draft_checkpoint import check_draft_checkpoint, draft_target
from quire_engine.models.files import check_files, check_tokenizer
from quire_engine.models.served import ServedCheckpoint, read_checkpoint

__all__ = ["check_checkpoint", "check_folder"]


def check_folder(
    folder: Path, tokenizer_folder: Path | None = None, load_format: str = "auto", model_impl: str = "auto"
) -> ServedCheckpoint:
    """Check the configuration, that there is a tokenizer, and the headers of the weight files. Takes milliseconds, and
    does not import torch.

    Args:
        folder: the checkpoint.
        tokenizer_folder: the tokenizer's folder, if it is another one.
        load_format: `dummy` needs no weight files.
        model_impl: whose code computes it; see `read_checkpoint`.

    Returns:
        The configuration.

    Raises:
        CheckpointError: something is missing, truncated or malformed.
    """
    check_files(folder)
    config = read_checkpoint(folder, model_impl)
    check_tokenizer(tokenizer_folder or folder)
    if load_format != "dummy":
        _ = open_checkpoint(folder).tensors
    return config


def check_checkpoint(
    folder: Path,
    tokenizer_folder: Path | None = None,
    load_format: str = "auto",
    drafts: tuple[str, str] | None = None,
    model_impl: str = "auto",
) -> ServedCheckpoint:
    """Check everything that can be checked without loading: what `check_folder` checks, and that the tensors are those
    of the model.

    Args:
        folder: see `check_folder`.
        tokenizer_folder: likewise.
        load_format: likewise.
        drafts: the method and the checkpoint of a model that drafts for it, if there is one.
        model_impl: see `check_folder`.

    Returns:
        The configuration.

    Raises:
        CheckpointError: something is missing, truncated or of the wrong shape.
    """
    config = check_folder(folder, tokenizer_folder, load_format, model_impl)
    if load_format != "dummy" and isinstance(config, CheckpointConfig):  # else only transformers knows the tensors
        from quire_engine.models.loader import check_weights  # imports torch

        check_weights(folder, config)
    if drafts is not None:
        method, draft_folder = drafts
        check_draft_checkpoint(method, Path(draft_folder), draft_target(config, method))
    return config
