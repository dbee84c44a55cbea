"""`quire eval`: the perplexity of a text under a checkpoint, and how near its predictions are to a reference's.

The rule is that of llama.cpp's perplexity tool, so that figures can be compared::

    tokens of the text   │ window 0              │ window 1              │ … │ rest, left out
                         │ context   │ scored    │ context   │ scored    │

Each window is a prompt of its own. The first token of its second half is context too: of 512 tokens 255 are scored.
A tokenizer that begins texts with a BOS token has it in place of each window's first.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError
from quire_cli.options import Settings

if TYPE_CHECKING:
    from quire_engine.config import EngineConfig

TextFile = Annotated[Path | None, ("FILE", "UTF-8. Default: the language reference that comes with Python.")]
Window = Annotated[int, typer.Option(min=4, help="Tokens of a window, the second half of which is scored.")]
_CHARACTERS_PER_TOKEN = 32
"""Far more than any text has, so that a long file is not read whole."""
_LARGEST_LOSS = 700.0
"""Whose exponential is a finite number."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text and where it comes from."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        """SHA-256."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Scores:
    """What a checkpoint predicts of a text, by scored token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    best: Sequence[int]
    """The most likely tokens."""

    @property
    def perplexity(self) -> float:
        """At most e^700."""
        return math.exp(min(-sum(self.logprobs) / len(self.logprobs), _LARGEST_LOSS))


def read_text(file: Path | None, num_tokens: int) -> Text:
    """The beginning of a text, long enough for a number of tokens.

    Args:
        file: UTF-8; None: the Python language reference that comes with Python.
        num_tokens: at least 1.

    Raises:
        UsageError: the file cannot be read.
    """
    size = num_tokens * _CHARACTERS_PER_TOKEN
    if file is None:
        from platform import python_version
        from pydoc_data import topics

        content = "\n".join(text for _, text in sorted(topics.topics.items()))
        return Text(f"the language reference of Python {python_version()}", content[:size])
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            return Text(str(file), opened.read(size))
    except UnicodeDecodeError as error:
        raise UsageError(f"--text: {file} is not valid UTF-8: {error.reason}; convert it") from None
    except OSError as error:
        raise UsageError(f"--text: {file} cannot be read: {error.strerror}") from None


@contextmanager
def explained_errors() -> Iterator[None]:
    """The engine's errors as a command's.

    Raises:
        CommandError: inside the block, the engine has failed, or a checkpoint or a file cannot be read or written.
    """
    from quire_engine.errors import EngineError

    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.filename or 'the file'}: {error.strerror}") from error
    except (EngineError, ValueError) as error:
        raise CommandError(str(error)) from error


def checked_config(model: Path, settings: Mapping[str, Any], window: int) -> "EngineConfig":
    """The configuration for windows of a size, with other settings; the checkpoint's headers are checked.

    Raises:
        CommandError: the checkpoint cannot be served.
        UsageError: a setting is bad.
    """
    from quire_cli.model_repository import check_model

    return check_model(model, {"max_model_len": window + 1, **settings})[0]


def score(
    model: Path,
    settings: Mapping[str, Any],
    text: Text,
    num_tokens: int,
    window: int,
    on_ready: Callable[[], None] = lambda: None,
) -> Scores:
    """What a checkpoint predicts of a text.

    Args:
        model: the checkpoint.
        settings: the engine's, as in `model.json`.
        text: of at least a window.
        num_tokens: of the text that are used, at most.
        window: tokens of a prompt.
        on_ready: called when the checkpoint is loaded.

    Raises:
        CommandError: the text is too short, or a window could not be computed.
        UsageError: a setting is bad.
        EngineError, ValueError: the checkpoint cannot be served with these settings.
    """
    from quire_engine import SamplingParams
    from quire_engine.frontend.tokenizer import load_tokenizer

    from quire_cli.generate import loaded_engine

    config = checked_config(model, settings, window)
    windows = cut_windows(load_tokenizer(Path(config.model.tokenizer_path)), text, num_tokens, window)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    rows: dict[int, list[tuple[int, float, int]]] = {}
    with loaded_engine(model, {"max_model_len": window + 1, **settings}) as llm:
        on_ready()
        with waiting_line(Console(), f"evaluating {model}", announce=False) as waiting:
            prompts = (({"prompt_token_ids": one}, params) for one in windows)
            for number, output in llm.generate_each(prompts):
                if isinstance(output, Exception) or output.prompt_logprobs is None:
                    reason = output if isinstance(output, Exception) else output.error
                    raise CommandError(f"{model}: a window of the text could not be computed: {reason}")
                rows[number] = []
                for place in range(window // 2 + 1, window):
                    entry = output.prompt_logprobs[place] or {}
                    best = next(token_id for token_id, one in entry.items() if one.rank == 1)
                    token_id = windows[number][place]
                    rows[number].append((token_id, entry[token_id].logprob, best))
                waiting.tick(100 * len(rows) // len(windows))
    scored = [row for number in range(len(windows)) for row in rows[number]]
    return Scores(*zip(*scored, strict=True))


def cut_windows(tokenizer: Any, text: Text, num_tokens: int, window: int) -> list[list[int]]:
    """The token ids of a text in windows; what is left at the end is dropped.

    Raises:
        CommandError: it does not fill one.
    """
    token_ids = tokenizer.encode(text.content)[:num_tokens]
    bos = next(iter(tokenizer.encode("")), None)
    windows = [token_ids[first : first + window] for first in range(0, len(token_ids) - window + 1, window)]
    if not windows:
        raise CommandError(f"{text.name} has {len(token_ids)} tokens; give a text that fills a window of {window}")
    if bos is not None and bos == tokenizer.bos_token_id:
        for one in windows:
            one[0] = bos
    return windows


def evaluate(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face checkpoint folder.")],
    settings: Settings = None,
    text: TextFile = None,
    reference: Annotated[Path | None, ("PATH", "Compare the predictions with those of this checkpoint.")] = None,
    reference_setting: Annotated[
        list[str] | None, ("KEY=VALUE", "A setting for the reference; may be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="The most tokens of the text to use.")] = 16384,
    window: Window = 512,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure the perplexity of a text under a checkpoint with some settings, with no server.

    The text is cut into windows, and in each the tokens of its second half are scored, as llama.cpp's perplexity tool
    does. With --reference also: how often both find the same token likeliest, and the mean difference of the
    log-probabilities of the text. Example: quire eval ./Llama-3.2-1B quantization=int4 --reference ./Llama-3.2-1B
    """
    from quire_cli.model_repository import parse_settings

    own_settings, reference_settings = parse_settings(settings or []), parse_settings(reference_setting or [])
    if reference_settings and reference is None:
        raise UsageError("--reference-setting is given without --reference; give both")
    content = read_text(text, tokens)
    with explained_errors():
        if reference is not None:  # before the first takes its minutes
            checked_config(reference, reference_settings, window)
        own = score(path, own_settings, content, tokens, window)
        figures: dict[str, Any] = {
            "model": str(path), "settings": own_settings, "text": content.name, "text_sha256": content.digest,
            "window": window, "num_scored_tokens": len(own.token_ids), "perplexity": own.perplexity,
        }  # fmt: skip
        if reference is not None:
            other = score(reference, reference_settings, content, tokens, window)
            figures["reference"] = {
                "model": str(reference), "settings": reference_settings, "perplexity": other.perplexity
            }  # fmt: skip
            figures |= compare(own, other)
    print(json.dumps(figures) if as_json else _as_table(figures))


def compare(own: Scores, reference: Scores) -> dict[str, float]:
    """How near predictions are to a reference's.

    Raises:
        CommandError: the tokens of the text differ.
    """
    if own.token_ids != reference.token_ids:
        raise CommandError("--reference has another tokenizer; only predictions of the same tokens can be compared")
    size = len(own.token_ids)
    pairs = zip(own.logprobs, reference.logprobs, strict=True)
    return {
        "top1_agreement": sum(map(int.__eq__, own.best, reference.best)) / size,
        "mean_abs_logprob_difference": sum(abs(a - b) for a, b in pairs) / size,
    }


def _as_table(figures: Mapping[str, Any]) -> str:
    lines = [
        ("text", f"{figures['text']}, {figures['num_scored_tokens']} tokens scored in windows of {figures['window']}"),
        ("perplexity", f"{figures['perplexity']:.4f}"),
    ]
    if "reference" in figures:
        lines += [
            ("of the reference", f"{figures['reference']['perplexity']:.4f}"),
            ("same likeliest token", f"{figures['top1_agreement']:.2%}"),
            ("mean |Δ log-probability|", f"{figures['mean_abs_logprob_difference']:.4f}"),
        ]
    return "\n".join(f"{name:26}{value}" for name, value in lines)
