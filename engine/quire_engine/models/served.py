"""Which code computes a checkpoint: ours, or transformers'."""

from pathlib import Path
from typing import Protocol

from quire_engine.models.checkpoint import CheckpointConfig, architecture_named
from quire_engine.models.fields import read_config
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.models.transformers_checkpoint import TransformersCheckpoint


class ServedCheckpoint(Protocol):
    """What the engine needs to know of any checkpoint, from its `config.json` and `generation_config.json`."""

    @property
    def architecture(self) -> str:
        """The first of `architectures`."""

    @property
    def dtype(self) -> str:
        """Of the weights."""

    @property
    def vocab_size(self) -> int:
        """Tokens."""

    @property
    def hidden_size(self) -> int:
        """Of the hidden states."""

    @property
    def head_size(self) -> int:
        """Of queries and keys."""

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence that it was made for."""

    @property
    def longest_model_len(self) -> int:
        """The longest sequence that it can be served with."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By layer, how many of its last keys each row sees at most, if the cache may forget the others; None: all."""

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """Layers and experts of a layer, if some layers have experts whose tokens are counted; else None."""

    @property
    def expert_bytes(self) -> int:
        """Of the weights of one such expert, about."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def check_parallel(
        self, tensor_parallel_size: int, pipeline_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> None:
        """Check that the model can be divided among this many ranks.

        Raises:
            ValueError: it cannot.
        """


def read_checkpoint(folder: Path, model_impl: str = "auto") -> ServedCheckpoint:
    """Read and check a checkpoint's configuration.

    Args:
        folder: the checkpoint.
        model_impl: `quire` for families of our own, `transformers` for transformers' code, `auto` for whichever has
            the architecture, ours first.

    Returns:
        A `CheckpointConfig` or a `TransformersCheckpoint`.

    Raises:
        CheckpointError: the folder or file is missing, or describes a model that cannot be served.
    """
    fields = read_config(folder)
    named = architecture_named(fields)
    is_ours = isinstance(named, str) and named in ARCHITECTURES
    if model_impl == "quire" or (model_impl == "auto" and is_ours):
        return CheckpointConfig.from_folder(folder)
    return TransformersCheckpoint.from_fields(folder, fields)
