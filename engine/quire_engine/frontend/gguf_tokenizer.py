"""Makes `tokenizer.json` from a GGUF file's metadata, as llama.cpp reads them.

Two kinds are known: `gpt2`, byte-level BPE with the regular expressions that `tokenizer.ggml.pre` names; and `llama`,
SentencePiece's BPE with byte fallback, whose merges follow from the scores of its tokens.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.frontend.tokenizer_limits import DEEPSEEK_V3, GPT_2, GPT_4O, LLAMA_3, QWEN_2, QWEN_3_5, TEKKEN
from quire_engine.models.checkpoints.files import brief
from quire_engine.models.checkpoints.gguf_types import Array

_DIGITS = r"\p{N}"
SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "phi-2", "granite-docling"), (GPT_2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), (_DIGITS, GPT_2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon-h1", "falcon3", "lfm2", "pixtral"), (LLAMA_3,)),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "glm4", "smaug-bpe"), (LLAMA_3,)),
    "qwen35": (QWEN_3_5,),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (QWEN_2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (GPT_4O,)),
    "tekken": (TEKKEN,),
    "deepseek-v3": DEEPSEEK_V3,
}
"""`tokenizer.ggml.pre` → the regular expressions that split a text, one after the other."""
WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon-h1", "falcon3", "lfm2", "pixtral", "tekken")
"""Those of `SPLITS` that add a first token unless the metadata decide it."""
WHOLE_WORDS = (*WITH_BOS, "glm4")
"""Those whose words are not merged if they are tokens."""
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type`."""
KEPT_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Phi 3's special tokens that keep the spaces after them."""


def write_tokenizer(folder: Path, values: Mapping[str, Any], source: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and a `config.json` with the model type.

    Args:
        folder: the destination.
        values: of the metadata.
        source: for messages.

    Raises:
        CheckpointError: the tokenizer is of another kind, or a value is malformed.
    """
    tokenizer = _Tokenizer(values, source)
    files = {
        "tokenizer.json": tokenizer.content(),
        "tokenizer_config.json": tokenizer.config(),
        "config.json": {"model_type": "llama"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


class _Tokenizer:
    def __init__(self, values: Mapping[str, Any], source: Path) -> None:
        self.source, self.values = source, values
        named, self.split = self.get("model", ""), self.get("pre", "default")
        self.kind = "llama" if named == "gemma4" else named  # which has merges of its own
        self.tokens = self.items("tokens", str)
        self.types = self.items("token_type", int) or [1] * len(self.tokens)
        if self.kind not in ("gpt2", "llama"):
            raise self.error("model", self.kind, "gpt2 or llama")
        if self.kind == "gpt2" and self.split not in SPLITS:
            raise self.error("pre", self.split, f"one of {', '.join(SPLITS)}")
        if len(self.types) != len(self.tokens):
            raise self.error("token_type", f"of {len(self.types)} tokens", f"of {len(self.tokens)}, as there are")

    def get(self, name: str, default: Any) -> Any:
        value = self.values.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not type(default):
            raise self.error(name, value, f"a value like {default!r}")
        return value

    def items(self, name: str, kind: type) -> list[Any]:
        value = self.values.get(f"tokenizer.ggml.{name}", [])
        found = value.read() if isinstance(value, Array) else value
        if not isinstance(found, list) or not all(type(one) is kind for one in found):
            raise self.error(name, value, f"a list of {kind.__name__}")
        return found

    def error(self, name: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: tokenizer.ggml.{name} is {brief(value)}; it must be {allowed}. The setting tokenizer may "
            "name a folder with the model's own tokenizer instead"
        )

    def special(self, name: str, default: int = -1) -> str | None:
        """The token that a value of the metadata names."""
        index = self.get(f"{name}_token_id", default if self.kind == "llama" else -1)
        return self.tokens[index] if 0 <= index < len(self.tokens) else None

    def config(self) -> dict[str, Any]:
        template = self.values.get("tokenizer.chat_template")
        named = {
            "bos_token": self.special("bos", 1), "eos_token": self.special("eos", 2),
            "unk_token": self.special("unknown", 0), "pad_token": self.special("padding"),
            "chat_template": template if isinstance(template, str) else None,
        }  # fmt: skip
        named = {name: value for name, value in named.items() if value is not None}
        return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}

    def content(self) -> dict[str, Any]:
        spelled = [self._spelled(token) for token in self.tokens]
        vocab: dict[str, int] = {}
        for index, token in enumerate(spelled):
            vocab.setdefault(token, index)
        takes_spaces = self.values.get("general.architecture") == "phi3" and self.kind == "llama"
        added = [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "normalized": False,
             "rstrip": takes_spaces and kind == CONTROL and token not in KEPT_SPACES,
             "special": kind in (CONTROL, UNKNOWN)}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token and vocab.get(token) == index
        ]  # fmt: skip
        merges = self.items("merges", str) or (_merges(vocab, self._scores(spelled)) if self.kind == "llama" else [])
        model = {
            "type": "BPE", "vocab": vocab, "merges": merges, "dropout": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "ignore_merges": self.kind == "gpt2" and self.split in WHOLE_WORDS,
            "unk_token": self.special("unknown", 0), "fuse_unk": self.kind == "llama",
            "byte_fallback": self.kind == "llama",
        }  # fmt: skip
        steps = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "post_processor": self._post_processor(vocab), "model": model, **steps,
        }  # fmt: skip

    def _spelled(self, token: str) -> str:
        """Some files write SentencePiece's tokens of several spaces as spaces."""
        return "▁" * len(token) if self.kind == "llama" and token and not token.strip(" ") else token

    def _scores(self, spelled: list[str]) -> list[float]:
        # Gemma's merges follow the order of its tokens, and not their scores.
        scores = [] if str(self.values.get("general.architecture")).startswith("gemma") else self.items("scores", float)
        return scores if len(scores) == len(spelled) else [-float(index) for index in range(len(spelled))]

    def _byte_level(self) -> dict[str, Any]:
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in SPLITS[self.split]
        ]
        steps = {"type": "Sequence", "pretokenizers": [*splits, level]}
        return {"normalizer": None, "pre_tokenizer": steps, "decoder": {**level, "use_regex": True}}

    def _sentencepiece(self) -> dict[str, Any]:
        has_prefix = self.get("add_space_prefix", True)
        spaces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
        decoder: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
        ]  # fmt: skip
        if has_prefix:
            spaces.insert(0, {"type": "Prepend", "prepend": "▁"})
            decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": spaces},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoder},
        }

    def _post_processor(self, vocab: Mapping[str, int]) -> dict[str, Any] | None:
        has_bos = self.get("add_bos_token", self.kind == "llama" or self.split in WITH_BOS)
        first, last = self.special("bos", 1) if has_bos else None, None
        if self.get("add_eos_token", False):
            last = self.special("eos", 2)

        def pieces(*sequences: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            for type_id, name in enumerate(sequences):
                found += [{"SpecialToken": {"id": first, "type_id": type_id}}] if first else []
                found.append({"Sequence": {"id": name, "type_id": type_id}})
                found += [{"SpecialToken": {"id": last, "type_id": type_id}}] if last else []
            return found

        special = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (first, last) if token}
        if not special:
            return None
        single, pair = pieces("A"), pieces("A", "B")
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that the tokens of SentencePiece's BPE imply: those with a higher score come first."""
    found = [
        (-scores[index], -at, vocab[token[:at]], token[:at], token[at:])
        for token, index in vocab.items()
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    found.sort()
    return [(left, right) for *_, left, right in found]
