"""Loads a checkpoint's tokenizer, for the frontend and the grammar compiler; the text and the bytes of tokens."""

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from quire_engine.errors import CheckpointError, RequestError, is_failure, one_line
from quire_engine.frontend.gguf_tokenizer import write_tokenizer
from quire_engine.frontend.tokenizer_limits import check_limits, has_step, try_tokenizer
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.files import read_json
from quire_engine.system.memory import paused_gc, trim_heap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyTokenizer: TypeAlias = "PreTrainedTokenizerBase | PlainTokenizer"
TokenBytes = Callable[[int], bytes]

PLAIN_TOKENIZER_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""transformers' class names, since and before version 5, of tokenizers that consist of a tokenizer.json alone."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
KNOWN_FIELDS = frozenset({
    *SPECIAL_TOKENS, "added_tokens_decoder", "add_prefix_space", "backend", "chat_template",
    "clean_up_tokenization_spaces", "is_local", "local_files_only", "model_input_names", "model_max_length",
    "padding_side", "tokenizer_class", "truncation_side",
})  # fmt: skip
"""Fields of `tokenizer_config.json` that `PlainTokenizer` reads, or that change nothing that the engine uses."""
CHANGING_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files that transformers reads if there is no `added_tokens_decoder`."""
_BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")
_DecoderStep = Callable[[str], str | bytes]


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
        ids = map(backend.token_to_id, dict.fromkeys(self.special_tokens_map.values()))
        self.all_special_ids: list[int] = [token_id for token_id in ids if token_id is not None]
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


@overload
def load_tokenizer(
    path: Path, *, plain: Literal[False] = False, is_tried: bool = False
) -> "PreTrainedTokenizerBase": ...
@overload
def load_tokenizer(path: Path, *, plain: Literal[True], is_tried: bool = False) -> AnyTokenizer: ...
def load_tokenizer(path: Path, *, plain: bool = False, is_tried: bool = False) -> AnyTokenizer:
    """The tokenizer of a checkpoint, a folder or a GGUF file, without downloads and without the checkpoint's own code.

    Args:
        path: the checkpoint.
        plain: a `PlainTokenizer` suffices.
        is_tried: another process has tried it, or does so meanwhile and ends this one if it fails.

    Raises:
        CheckpointError: there is none, or it does not load.
    """
    source = open_checkpoint(path, "tokenizer").tokenizer()
    if isinstance(source, Path):
        return _load_folder(source, path, plain, is_tried)
    with tempfile.TemporaryDirectory(prefix="quire-tokenizer-") as name:
        write_tokenizer(Path(name), source, path)
        return _load_folder(Path(name), path, plain, is_tried)


def _load_folder(folder: Path, source: Path, plain: bool, is_tried: bool) -> AnyTokenizer:
    try:
        with ThreadPoolExecutor(1) as thread, paused_gc():
            trial = None if is_tried else thread.submit(try_tokenizer, folder)
            is_plain = _is_plain(folder)
            if not (plain and is_plain):
                import transformers
            if trial is not None:
                trial.result()
            if plain and is_plain:
                try:
                    own = PlainTokenizer(folder)
                except ValueError:
                    pass
                else:
                    check_limits(own.backend_tokenizer)
                    trim_heap()  # parsing the file takes as much memory again as the tokenizer
                    return own
            import transformers

            loader: Any = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
        with _without_library_warnings():
            tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            check_limits(backend)
    except CheckpointError:
        raise
    except BaseException as error:  # the library raises whatever its parsers raise
        if not is_failure(error):
            raise
        raise CheckpointError(f"tokenizer: {source} does not load: {_reason(error)}") from error
    trim_heap()  # parsing the file takes as much memory again as the tokenizer
    tokenizer.model_max_length = 10**30  # the engine checks the length; the library would only log a warning
    return tokenizer


class TokenDecoder:
    """Text of token ids, and the facts that detokenizers need; one for all requests. Thread-safe."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer: Any = tokenizer
        self._settings = {"clean_up_tokenization_spaces": False}
        if _decodes_plainly(tokenizer):
            self._tokenizer, self._settings = backend, {}  # the same, in half the time
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that `skip_special_tokens` leaves out."""
        has_bytes = has_step(backend, "decoder", "ByteFallback")
        names = [f"<0x{byte:02X}>" for byte in range(256)] + [f"<0x{byte:02x}>" for byte in range(256)]
        ids = [backend.token_to_id(name) for name in names] if has_bytes else []
        self.byte_ids = frozenset(token_id for token_id in ids if token_id is not None)
        """Tokens of single bytes, if the tokenizer has byte fallback."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            RequestError: the tokenizer fails on them.
        """
        try:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **self._settings)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise RequestError("prompt_token_ids", f"the tokenizer fails on these tokens: {one_line(error)}") from None
        return text


def _decodes_plainly(tokenizer: Any) -> bool:
    if isinstance(tokenizer, PlainTokenizer):
        return True
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    return (type(tokenizer).decode, getattr(type(tokenizer), "_decode", None)) == (fast.decode, fast._decode)


@contextlib.contextmanager
def _without_library_warnings() -> Iterator[None]:
    """Suppress those of transformers: it warns of a type of model that it does not know, which the engine may know."""
    from transformers.utils.logging import get_verbosity, set_verbosity

    before = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(before)


def _reason(error: BaseException) -> str:
    if "trust_remote_code" in str(error):  # the library's advice
        return "it needs Python code of the checkpoint's own (auto_map), which is never run"
    return one_line(error)


def _is_plain(folder: Path) -> bool:
    """Whether a Llama's tokenizer consists of its tokenizer.json alone.

    `AutoTokenizer` would choose the same class, but imports torch and the models, which take 2 s and 100 MB.
    """
    try:
        model_type = read_json(folder / "config.json")["model_type"]
        tokenizer_class = read_json(folder / "tokenizer_config.json")["tokenizer_class"]
    except (CheckpointError, KeyError):
        return False
    return (
        (folder / "tokenizer.json").is_file() and model_type == "llama" and tokenizer_class in PLAIN_TOKENIZER_CLASSES
    )


def token_bytes(tokenizer: "AnyTokenizer") -> TokenBytes:
    """Make the function token id → bytes. The tokens of a text have the bytes of the text.

    `decode` cannot tell them: a part of a character alone becomes a replacement character, and a leading space is
    stripped. So they come from the token's name in the vocabulary. The tokenizer's decoder names the steps: byte-level
    BPE, SentencePiece's space, byte fallback. With any other decoder the bytes are those of the token's text alone.
    """
    steps = _decoder_steps(tokenizer)

    def of_token(token_id: int) -> bytes:
        name = tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(name, str):
            return b""  # the model's vocabulary may be larger than the tokenizer's
        value: str | bytes = name
        for step in steps or ():
            if isinstance(value, str):
                value = step(value)
        if steps is None:
            text = tokenizer.decode([token_id])
            assert isinstance(text, str)
            value = text
        return value if isinstance(value, bytes) else value.encode()

    return of_token


def _decoder_steps(tokenizer: "AnyTokenizer") -> list[_DecoderStep] | None:
    """The decoder's steps for one token; None: one of them is not known here."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = [_decoder_step(part) for part in (decoder["decoders"] if decoder["type"] == "Sequence" else [decoder])]
    known = [step for step in steps if step is not None]
    return known if len(known) == len(steps) else None


def _decoder_step(decoder: dict[str, Any]) -> _DecoderStep | None:
    kind = decoder["type"]
    if kind == "ByteLevel":
        return _of_byte_level
    if kind == "ByteFallback":
        return _of_byte_fallback
    if kind == "Metaspace":
        return lambda name: name.replace(decoder["replacement"], " ")
    if kind == "Replace" and "String" in decoder["pattern"]:
        return lambda name: name.replace(decoder["pattern"]["String"], decoder["content"])
    if kind in ("Fuse", "Strip"):  # of the whole text
        return lambda name: name
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are the characters of the same number, the others are those from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _of_byte_level(name: str) -> str | bytes:
    """A name with any other character, which only added tokens have, is text, as in the decoder."""
    if not all(character in _BYTE_ALPHABET for character in name):
        return name
    return bytes(_BYTE_ALPHABET[character] for character in name)


def _of_byte_fallback(name: str) -> str | bytes:
    match = _BYTE_NAME.fullmatch(name)
    return bytes([int(match[1], 16)]) if match else name
