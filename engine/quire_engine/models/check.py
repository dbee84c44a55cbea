"""Checks what is to be served before anything is loaded, which takes milliseconds."""

from pathlib import Path

from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.draft_checkpoint import check_draft_checkpoint
from quire_engine.models.files import check_files, check_tokenizer
from quire_engine.models.weights import check_weights

__all__ = ["check_checkpoint"]


def check_checkpoint(
    folder: Path,
    tokenizer_folder: Path | None = None,
    load_format: str = "auto",
    drafts: tuple[str, str] | None = None,
) -> CheckpointConfig:
    """Check everything that can be checked without loading: configuration, tokenizer, weight files, tensors' shapes.

    Args:
        folder: the checkpoint.
        tokenizer_folder: the tokenizer's folder, if it is another one.
        load_format: `dummy` needs no weight files.
        drafts: the method and the checkpoint of a model that drafts for it, if there is one.

    Returns:
        The configuration.

    Raises:
        CheckpointError: something is missing, truncated or of the wrong shape.
    """
    check_files(folder)
    config = CheckpointConfig.from_folder(folder)
    check_tokenizer(tokenizer_folder or folder)
    if load_format != "dummy":
        check_weights(folder, config)
    if drafts is not None:
        method, draft_folder = drafts
        check_draft_checkpoint(method, Path(draft_folder), config)
    return config
