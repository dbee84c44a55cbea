"""Checks what is to be served before anything is loaded, which takes milliseconds."""

from pathlib import Path

from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.draft_checkpoint import check_draft_checkpoint, draft_target
from quire_engine.models.files import check_files, check_tokenizer
from quire_engine.models.served import ServedCheckpoint, read_checkpoint
from quire_engine.models.weights import check_weights, read_tensors

__all__ = ["check_checkpoint"]


def check_checkpoint(
    folder: Path,
    tokenizer_folder: Path | None = None,
    load_format: str = "auto",
    drafts: tuple[str, str] | None = None,
    model_impl: str = "auto",
) -> ServedCheckpoint:
    """Check everything that can be checked without loading: configuration, tokenizer, weight files, tensors' shapes.

    Args:
        folder: the checkpoint.
        tokenizer_folder: the tokenizer's folder, if it is another one.
        load_format: `dummy` needs no weight files.
        drafts: the method and the checkpoint of a model that drafts for it, if there is one.
        model_impl: whose code computes it; see `read_checkpoint`.

    Returns:
        The configuration.

    Raises:
        CheckpointError: something is missing, truncated or of the wrong shape.
    """
    check_files(folder)
    config = read_checkpoint(folder, model_impl)
    check_tokenizer(tokenizer_folder or folder)
    if load_format != "dummy":
        if isinstance(config, CheckpointConfig):
            check_weights(folder, config)
        else:
            read_tensors(folder, str)  # only transformers knows which there must be
    if drafts is not None:
        method, draft_folder = drafts
        check_draft_checkpoint(method, Path(draft_folder), draft_target(config, method))
    return config
