"""Loads a checkpoint's tokenizer: for the frontend, and for the grammar compiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_engine.errors import CheckpointError
from quire_engine.models.files import check_tokenizer, read_json
from quire_engine.system.memory import paused_gc, trim_heap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_tokenizer"]

PLAIN_TOKENIZER_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""transformers' class names, since and before version 5, of tokenizers that consist of a tokenizer.json only."""


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint folder, without downloads or the checkpoint's own code.

    Raises:
        CheckpointError: there is none, or it does not load.
    """
    check_tokenizer(folder)
    try:
        with paused_gc():
            import transformers

            loader: Any = transformers.PreTrainedTokenizerFast if _is_plain(folder) else transformers.AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers raise
        raise CheckpointError(f"tokenizer: {folder} does not load: {error}") from error
    trim_heap()  # parsing the file takes as much memory again as the tokenizer
    tokenizer.model_max_length = 10**30  # the length is checked here, by name; the library would only log a warning
    return tokenizer


def _is_plain(folder: Path) -> bool:
    """Whether a Llama's tokenizer consists of its tokenizer.json only.

    `AutoTokenizer` would choose the same class, but imports torch and the models, which a frontend does not need: 2 s
    and 100 MB.
    """
    try:
        model_type = read_json(folder / "config.json")["model_type"]
        tokenizer_class = read_json(folder / "tokenizer_config.json")["tokenizer_class"]
    except (CheckpointError, KeyError):
        return False
    return (
        (folder / "tokenizer.json").is_file() and model_type == "llama" and tokenizer_class in PLAIN_TOKENIZER_CLASSES
    )
