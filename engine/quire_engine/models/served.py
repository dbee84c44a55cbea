"""What is served: which code computes a checkpoint, ours or transformers', and what can be checked before loading."""

import dataclasses
from pathlib import Path

from quire_engine.errors import CheckpointError, cut
from quire_engine.kv_cache.state import STATE
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig, ServedCheckpoint, architecture_named
from quire_engine.models.checkpoints.fields import read_config
from quire_engine.models.checkpoints.files import TOKENIZER_FILES, check_files
from quire_engine.models.fallback.checkpoint import TransformersCheckpoint, is_listed
from quire_engine.models.registry import (
    ARCHITECTURES,
    ASSISTANT_ARCHITECTURES,
    DFLASH_ARCHITECTURES,
    EAGLE3_ARCHITECTURES,
    POOLING_ARCHITECTURES,
    unlisted_family,
)

_METHODS = {
    "MedusaModel": "medusa",
    **dict.fromkeys(EAGLE3_ARCHITECTURES, "eagle3"),
    **dict.fromkeys(ASSISTANT_ARCHITECTURES, "gemma4_assistant"),
    **dict.fromkeys(DFLASH_ARCHITECTURES, "dflash"),
}
"""Architectures of what drafts by another method."""


def read_checkpoint(folder: Path, model_impl: str = "auto") -> ServedCheckpoint:
    """Read and check a checkpoint's configuration: a `CheckpointConfig` or a `TransformersCheckpoint`.

    Args:
        folder: the checkpoint.
        model_impl: `quire` for families of our own, `transformers` for transformers' code, `auto` for whichever has
            the architecture, ours first.

    Raises:
        CheckpointError: the folder or file is missing, or describes a model that cannot be served.
    """
    fields = read_config(folder)
    named = architecture_named(fields)
    is_ours = isinstance(named, str) and (
        named in ARCHITECTURES
        or named in POOLING_ARCHITECTURES
        or (unlisted_family(named, fields) is not None and is_listed(named, "IMAGE_TEXT_TO_TEXT"))
    )
    if model_impl == "quire" or (model_impl == "auto" and is_ours):
        return CheckpointConfig.from_folder(folder)
    return TransformersCheckpoint.from_fields(folder, fields)


def check_folder(
    folder: Path, tokenizer_folder: Path | None = None, load_format: str = "auto", model_impl: str = "auto"
) -> ServedCheckpoint:
    """Check the configuration, that there is a tokenizer, and the headers of the weight files. Takes milliseconds, and
    does not import torch.

    Args:
        folder: the checkpoint, or its GGUF file.
        tokenizer_folder: the tokenizer's, if it is another one.
        load_format: `dummy` needs no weight files.
        model_impl: whose code computes it; see `read_checkpoint`.

    Raises:
        CheckpointError: something is missing, truncated or malformed.
    """
    check_files(folder)
    config = read_checkpoint(folder, model_impl)
    open_checkpoint(tokenizer_folder or folder, "tokenizer").tokenizer()
    if load_format != "dummy":
        _ = open_checkpoint(folder).tensors
    return config


def check_checkpoint(
    folder: Path,
    tokenizer_folder: Path | None = None,
    load_format: str = "auto",
    drafts: tuple[str, str | None] | None = None,
    model_impl: str = "auto",
) -> ServedCheckpoint:
    """Check everything that can be checked without loading: what `check_folder` does, and that the tensors are those of
    the model, and of the model that drafts for it if `drafts` has its method and its checkpoint (None: the same).

    Raises:
        CheckpointError: something is missing, truncated or of the wrong shape.
    """
    config = check_folder(folder, tokenizer_folder, load_format, model_impl)
    if load_format != "dummy" and isinstance(config, CheckpointConfig):  # else only transformers knows the tensors
        from quire_engine.models.loader import check_weights  # imports torch

        check_weights(folder, config)
    if drafts is not None:
        method, draft_folder = drafts
        check_draft_checkpoint(method, Path(draft_folder or folder), draft_target(config, method), load_format)
    return config


def check_replacement(
    folder: Path,
    tokenizer_folder: Path,
    present_tokenizer: Path,
    checkpoint: ServedCheckpoint,
    load_format: str = "auto",
    model_impl: str = "auto",
) -> None:
    """Check that the weights of another folder may take the place of the present ones, as far as that can be checked
    without loading them.

    Args:
        folder: the other folder, or its GGUF file.
        tokenizer_folder: its tokenizer's.
        present_tokenizer: the folder of the present one.
        checkpoint: the present one.
        load_format: as of `check_folder`, like `model_impl`.
        model_impl: likewise.

    Raises:
        CheckpointError: something is missing, or it is another model or another tokenizer.
        OSError: a tokenizer's file cannot be read.
    """
    found = check_folder(folder, tokenizer_folder, load_format, model_impl)
    for item in dataclasses.fields(checkpoint):
        here, there = getattr(checkpoint, item.name), getattr(found, item.name, None)
        if here != there:
            shown = f" is {cut(str(there))} there and {cut(str(here))} here"
            raise CheckpointError(f"{folder}: it is another model: {item.name}{shown}; load it as a model of its own")
    if _tokenizer_values(tokenizer_folder) != _tokenizer_values(present_tokenizer):
        raise CheckpointError(
            f"{folder}: its tokenizer is not that of {present_tokenizer}; load it as a model of its own, or copy "
            "the tokenizer's files there if it was trained with that one"
        )


def _tokenizer_values(folder: Path) -> object:
    """What is equal of equal tokenizers."""
    tokenizer = open_checkpoint(folder, "tokenizer").tokenizer()
    if not isinstance(tokenizer, Path):
        from quire_engine.models.checkpoints.gguf_types import Array

        return {name: value.read() if isinstance(value, Array) else value for name, value in tokenizer.items()}
    paths = [tokenizer / name for name in TOKENIZER_FILES]
    return [path.read_bytes() if path.is_file() else None for path in paths]


def check_draft_checkpoint(method: str, folder: Path, target: CheckpointConfig, load_format: str = "auto") -> None:
    """Check everything that can be checked without loading the checkpoint of `method`: one that has a model of its own,
    or `mtp`, whose checkpoint is the target's. Raises CheckpointError if something is missing, truncated or of the
    wrong shape, or does not fit the target."""
    # These import torch.
    from quire_engine.models.dflash import DFlashCheckpoint
    from quire_engine.models.eagle3 import Eagle3Checkpoint
    from quire_engine.models.gemma4_assistant import AssistantCheckpoint
    from quire_engine.models.loader import check_weights
    from quire_engine.models.medusa import MedusaCheckpoint
    from quire_engine.models.mtp import check_mtp

    if method == "medusa":
        MedusaCheckpoint.from_folder(folder, target)
    elif method == "eagle3":
        Eagle3Checkpoint.from_folder(folder, target)
    elif method == "dflash":
        DFlashCheckpoint.from_folder(folder, target)
    elif method == "gemma4_assistant":
        AssistantCheckpoint.from_folder(folder, target)
    elif method == "mtp":
        check_mtp(folder, target, is_dummy=load_format == "dummy")
    else:
        check_weights(folder, read_draft_model(folder, target))


def draft_target(target: ServedCheckpoint, method: str) -> CheckpointConfig:
    """The configuration of a model that another one can draft for. Raises CheckpointError for transformers' code, and
    for a model without attention unless `method` keeps nothing between steps."""
    if not isinstance(target, CheckpointConfig):
        raise CheckpointError(
            f"speculative_config: method is {method!r}; {target.architecture} runs with transformers' own code, for "
            "which only the methods ngram and suffix draft"
        )
    if method != "medusa" and all(window == STATE for window in target.windows):
        raise CheckpointError(
            f"speculative_config: method is {method!r}; {target.architecture} has no attention, and such a method uses "
            "the blocks of its keys and values: draft with ngram, suffix or medusa"
        )
    return target


def read_draft_model(folder: Path, target: CheckpointConfig) -> CheckpointConfig:
    """The configuration of a draft model. Raises CheckpointError if it describes no model that can be served, one with
    another vocabulary, or one with recurrent layers: drafts that are rejected cannot be taken back from a state."""
    kind = _METHODS.get(str((read_config(folder, "speculative_config: model").values.get("architectures") or [""])[0]))
    if kind is not None:
        raise CheckpointError(f"{folder / 'config.json'}: that is no draft model; set method to {kind!r}")
    config = CheckpointConfig.from_folder(folder)
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{folder / 'config.json'}: vocab_size is {config.vocab_size}; a model that drafts must have the "
            f"vocabulary of the one that it drafts for, which has {target.vocab_size} tokens"
        )
    if STATE in config.windows:
        raise CheckpointError(
            f"{folder / 'config.json'}: {config.architecture} has recurrent layers; a model that drafts must have "
            "attention alone: choose another, or another method"
        )
    return config
