"""The bytes of a token, from its name in the vocabulary. The tokens of a text have the bytes of the text.

`decode` cannot tell them: a part of a character alone becomes a replacement character, and a leading space is stripped.
"""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_engine.frontend.plain_tokenizer import AnyTokenizer

TokenBytes = Callable[[int], bytes]

_BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")
_Step = Callable[[str], str | bytes]


def token_bytes(tokenizer: "AnyTokenizer") -> TokenBytes:
    """Make the function token id → bytes.

    The tokenizer's decoder names the steps: byte-level BPE, SentencePiece's space, byte fallback. With any other
    decoder the bytes are those of the token's text alone.
    """
    steps = _steps(tokenizer)

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


def _steps(tokenizer: "AnyTokenizer") -> list[_Step] | None:
    """The decoder's steps for one token; None: one of them is not known here."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = [_step(part) for part in (decoder["decoders"] if decoder["type"] == "Sequence" else [decoder])]
    known = [step for step in steps if step is not None]
    return known if len(known) == len(steps) else None


def _step(decoder: dict[str, Any]) -> _Step | None:
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
