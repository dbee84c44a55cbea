"""One job of the grammar compiler: a schema, expression or grammar → xgrammar's compiled form, tested."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from quire_engine.frontend.tokenizer import AnyTokenizer, PlainTokenizer
from quire_engine.scheduler.grammar import GrammarError
from quire_engine.structured_output.compiler_messages import CompilerArguments, CompileRequest, CompileResult
from quire_engine.structured_output.json_schema import to_ebnf
from quire_engine.structured_output.pattern import literal
from quire_engine.structured_output.xgrammar import SharedGrammar, XGrammar, xgrammar
from quire_engine.structured_outputs_params import schemas_of_tag

MAX_COMPILED_BYTES = 32 << 20
"""Limit of a compiled grammar as text. The engine core reads it at some 30 ms per MB, in a second thread."""
MAX_ERROR_CHARACTERS = 300


class GrammarCompiler:
    """Compiles in this process, whose time and memory `compiler` limits."""

    def __init__(self, tokenizer: AnyTokenizer, arguments: CompilerArguments) -> None:
        self.tokenizer_info = make_tokenizer_info(tokenizer, arguments.vocab_size, arguments.stop_token_ids)
        # A process with threads cannot fork safely; and each grammar is compiled only once, so a cache is useless.
        self._compiler = xgrammar.GrammarCompiler(self.tokenizer_info, max_threads=1, cache_enabled=False)

    def compile(self, request: CompileRequest) -> CompileResult:
        """Compile, serialize, read back and try the first token, so that a crash happens here."""
        try:
            with _captured_stderr() as read_stderr:
                compiled = self._compiler.compile_grammar(_to_grammar(request))
                _reject_warnings(read_stderr())
                text = compiled.serialize_json()
                if len(text) > MAX_COMPILED_BYTES:
                    raise GrammarError(f"the {request.kind} is too complex: compiled, it has {len(text) >> 20} MiB")
                grammar = XGrammar(SharedGrammar.load(text, self.tokenizer_info))
                grammar.fill_bitmask(np.zeros((1, -(-self.tokenizer_info.vocab_size // 32)), np.int32), 0)
        except Exception as error:  # of any kind that the library's parsers raise
            message = _clean(str(error) or repr(error))
            if isinstance(error, RecursionError):
                message = f"the {request.kind} nests too deeply"
            elif isinstance(error, MemoryError) or "bad_alloc" in message:
                message = f"the {request.kind} takes too much memory to compile; simplify it"
            return CompileResult(request.job_id, error=message.removeprefix("structured_outputs: "))
        return CompileResult(request.job_id, text)


def make_tokenizer_info(tokenizer: AnyTokenizer, vocab_size: int, stop_token_ids: list[int]) -> xgrammar.TokenizerInfo:
    """The text of every token. Special tokens have none, as they are no part of a completion's text.

    Raises:
        ValueError: the tokenizer is of an unknown kind, or has no end-of-sequence token.
    """
    own = [tokenizer.eos_token_id]
    stop_ids = list(dict.fromkeys([*stop_token_ids, *(i for i in own if i is not None and i < vocab_size)]))
    if not stop_ids:
        raise ValueError("the model has no end-of-sequence token")
    known: Any = tokenizer
    if isinstance(tokenizer, PlainTokenizer):  # which has what the library reads of transformers' class
        library: Any = xgrammar.tokenizer_info
        library.PreTrainedTokenizerFast = PlainTokenizer
    info = xgrammar.TokenizerInfo.from_huggingface(known, vocab_size=vocab_size, stop_token_ids=stop_ids)
    vocabulary = list(info.decoded_vocab)
    for token_id in tokenizer.all_special_ids:
        if token_id < vocab_size and token_id not in stop_ids:
            vocabulary[token_id] = b""
    return xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop_ids,
        add_prefix_space=info.add_prefix_space,
    )  # fmt: skip


def _to_grammar(request: CompileRequest) -> xgrammar.Grammar:
    kind, text = request.kind, request.text
    if kind == "regex":
        return xgrammar.Grammar.from_regex(text)
    if kind == "choice":
        choices = " | ".join(literal(choice) for choice in json.loads(text))
        return xgrammar.Grammar.from_ebnf(f"root ::= {choices}")
    if kind == "grammar":
        return xgrammar.Grammar.from_ebnf(text) if "::=" in text else xgrammar.Grammar.from_lark(text)
    if kind == "structural_tag":
        return _from_structural_tag(json.loads(text), request.any_whitespace)
    schema = {"type": "object"} if kind == "json_object" else json.loads(text)
    return xgrammar.Grammar.from_ebnf(to_ebnf(schema, any_whitespace=request.any_whitespace))


def _from_structural_tag(tag: dict[str, Any], any_whitespace: bool) -> xgrammar.Grammar:
    """In xgrammar's own form, or in the older one with `structures` and `triggers`, which vLLM accepts too."""
    if "structures" in tag:
        tags = [
            {
                "begin": part["begin"],
                "content": {"type": "json_schema", "json_schema": part["schema"]},
                "end": part["end"],
            }
            for part in tag["structures"]
        ]
        content = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        tag = {"type": "structural_tag", "format": content}
    for part in schemas_of_tag(tag):
        style = "qwen_xml" if part.get("type") != "json_schema" else part.get("style", "json")
        options = ["style"] * (style != "json") + [name for name in ("any_order", "excludes") if part.get(name)]
        if options:
            raise GrammarError(f"the structural tag has a schema with {options[0]!r}, which cannot be enforced")
        schema = part["json_schema"]
        part.clear()
        part.update(type="grammar", grammar=to_ebnf(schema, any_whitespace=any_whitespace))
    return xgrammar.Grammar.from_structural_tag(json.dumps(tag))


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Captures stderr, where the library reports what it ignores; yields a function that returns the text so far."""
    kept, captured = os.dup(2), os.memfd_create("stderr")
    os.dup2(captured, 2)
    try:
        yield lambda: os.pread(captured, 1 << 16, 0).decode(errors="replace")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(captured)


def _reject_warnings(stderr: str) -> None:
    """What the library ignores would not be enforced."""
    for line in stderr.splitlines():
        if "Warning:" in line:
            raise GrammarError(line.partition("Warning:")[2].strip())


def _clean(message: str) -> str:
    """The message without the library's times and source locations."""
    message = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is false: )?", "", message)
    return " ".join(message.split())[:MAX_ERROR_CHARACTERS]
