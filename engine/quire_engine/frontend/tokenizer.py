"""Loads a checkpoint's tokenizer: for the frontend, and for the grammar compiler."""

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from quire_engine.errors import CheckpointError, RequestError, is_failure, one_line
from quire_engine.frontend.gguf_tokenizer import write_tokenizer
from quire_engine.frontend.plain_tokenizer import AnyTokenizer, PlainTokenizer
from quire_engine.frontend.tokenizer_limits import check_limits, has_step, try_tokenizer
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.files import read_json
from quire_engine.system.memory import paused_gc, trim_heap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TOKENIZER_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""transformers' class names, since and before version 5, of tokenizers that consist of a tokenizer.json alone."""


@overload
def load_tokenizer(path: Path, *, plain: Literal[False] = False) -> "PreTrainedTokenizerBase": ...
@overload
def load_tokenizer(path: Path, *, plain: Literal[True]) -> AnyTokenizer: ...
def load_tokenizer(path: Path, *, plain: bool = False) -> AnyTokenizer:
    """The tokenizer of a checkpoint, a folder or a GGUF file, without downloads and without the checkpoint's own code.

    Args:
        path: the checkpoint.
        plain: a `PlainTokenizer` suffices.

    Raises:
        CheckpointError: there is none, or it does not load.
    """
    source = open_checkpoint(path, "tokenizer").tokenizer()
    if isinstance(source, Path):
        return _load_folder(source, path, plain)
    with tempfile.TemporaryDirectory(prefix="quire-tokenizer-") as name:
        write_tokenizer(Path(name), source, path)
        return _load_folder(Path(name), path, plain)


def _load_folder(folder: Path, source: Path, plain: bool) -> AnyTokenizer:
    try:
        with ThreadPoolExecutor(1) as thread, paused_gc():
            tried, is_plain = thread.submit(try_tokenizer, folder), _is_plain(folder)
            if plain and is_plain:
                tried.result()
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
            tried.result()
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
