"""PlainTokenizer: a tokenizer that consists of `tokenizer.json`, without transformers."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quire_engine.models.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyTokenizer: TypeAlias = "PreTrainedTokenizerBase | PlainTokenizer"

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
KNOWN_FIELDS = frozenset({
    *SPECIAL_TOKENS, "added_tokens_decoder", "add_prefix_space", "backend", "chat_template",
    "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_input_names", "model_max_length",
    "padding_side", "tokenizer_class", "truncation_side",
})  # fmt: skip
"""Fields of `tokenizer_config.json` that `PlainTokenizer` reads, or that change nothing that the engine uses."""
CHANGING_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files that transformers reads if there is no `added_tokens_decoder`."""


class PlainTokenizer:
    """The engine's part of transformers' tokenizer, with the same results, if that consists of `tokenizer.json`.
    Importing transformers would take half a second and 60 MB.

    Args:
        folder: the checkpoint.

    Raises:
        ValueError: transformers would make a different tokenizer, with the folder's other files.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer

        config = read_json(folder / "tokenizer_config.json")
        files = () if "added_tokens_decoder" in config else CHANGING_FILES
        if config.keys() - KNOWN_FIELDS or any(
            (folder / name).exists() for name in (*files, "additional_chat_templates")
        ):
            raise ValueError("there are other files or fields")
        self.backend_tokenizer = backend = Tokenizer.from_file(os.fspath(folder / "tokenizer.json"))
        backend.no_padding()
        backend.no_truncation()
        added = backend.get_added_tokens_decoder()
        given = {int(number): AddedToken(**token) for number, token in config.get("added_tokens_decoder", {}).items()}
        self.special_tokens_map = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
        known = [token.content for token in added.values() if token.special]
        if any(token not in known for token in self.special_tokens_map.values()) or any(
            added.get(i) != token for i, token in given.items()
        ):
            raise ValueError("there are other special tokens than those of tokenizer.json")
        if backend.post_processor is None:
            raise ValueError("tokenizer.json does not say what a text begins with")
        self.eos_token_id = backend.token_to_id(self.special_tokens_map.get("eos_token", ""))
        template = folder / "chat_template.jinja"
        self.chat_template: str | None = (
            template.read_text("utf-8") if template.exists() else config.get("chat_template")
        )
        if not isinstance(self.chat_template, str | None):
            raise ValueError("there are several chat templates")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        token_ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, token_ids: int | list[int]) -> Any:
        """The name of a token, or of each of several; None for an unknown id."""
        if isinstance(token_ids, int):
            return self.backend_tokenizer.id_to_token(token_ids)
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in token_ids]

    def get_vocab(self) -> dict[str, int]:
        """Token ids by name."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def get_chat_template(self) -> str:
        """The checkpoint's chat template.

        Raises:
            ValueError: there is none.
        """
        if self.chat_template is None:
            raise ValueError("the checkpoint has no chat template")
        return self.chat_template
