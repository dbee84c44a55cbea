"""Many prompts from a file of JSON lines, and their results as JSON lines: one for each, in the same order.

::

    {"prompt": "def fib(", "max_tokens": 8, "custom_id": "a"}
    {"line": 1, "custom_id": "a", "prompt": "def fib(", …, "outputs": [{"index": 0, "text": "n):", …}]}
    {"line": 2, "error": {"message": "…", "param": "temperature"}}
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    from quire_engine import LLM, RequestOutput, SamplingParams
    from quire_engine.frontend.default_sampling_params import DefaultSamplingParams

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_OUTPUT_FIELDS = ("prompt", "prompt_token_ids", "prompt_logprobs", "num_cached_tokens")
_SEQUENCE_FIELDS = ("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason")


@dataclass(slots=True)
class _Entry:
    """One line of the file."""

    labels: dict[str, Any]
    """The first keys of its result: `line`, and `custom_id` if it has one."""
    prompt: Any = None
    params: "SamplingParams | None" = None
    result: dict[str, Any] | None = None
    """Set from the beginning if the line is invalid."""


class Batch:
    """Prompts with their parameters, and their results so far."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self._num_written = 0

    @classmethod
    def of(cls, prompt: str, params: "SamplingParams") -> "Batch":
        """One prompt, not from a file."""
        return cls([_Entry({}, prompt, params)])

    def only_result(self, llm: "LLM") -> str:
        """Generate from the one prompt; returns its JSON object.

        Raises:
            RequestError: it was refused.
            CommandError: it failed.
        """
        (entry,) = self._entries
        for _, outcome in llm.generate_each([(entry.prompt, entry.params)]):  # type: ignore[list-item]
            if isinstance(outcome, Exception):
                raise outcome
            if outcome.error is not None:
                raise CommandError(outcome.error)
            entry.result = _as_json(outcome)
        return _dump(entry)

    def run(self, llm: "LLM", console: Console, write: Callable[[str], None]) -> None:
        """Generate from all prompts, and write each result as soon as it and those before it are complete.

        Raises:
            CommandError: some failed; the others were completed.
        """
        usable = [entry for entry in self._entries if entry.params is not None]
        total, num_done = len(self._entries), len(self._entries) - len(usable)
        try:
            with waiting_line(console, f"generating for {total} prompts") as waiting:
                self._write_results(write)
                for number, outcome in llm.generate_each((entry.prompt, entry.params) for entry in usable):  # type: ignore[misc]
                    usable[number].result = _outcome(outcome)
                    num_done += 1
                    self._write_results(write)
                    waiting.tick(100 * num_done // total)
        except BaseException:  # whatever stopped the rest, complete results are not lost
            self._write_results(write, gaps=True)
            raise
        num_failed = sum("error" in (entry.result or {}) for entry in self._entries)
        if num_failed:
            raise CommandError(f"{num_failed} of {total} prompts failed; each says why in its line of the output")
        console.line(f"quire: {total} prompts done")

    def _write_results(self, write: Callable[[str], None], *, gaps: bool = False) -> None:
        """Write results up to the first that is missing, or skipping those that are."""
        for entry in self._entries[self._num_written :]:
            if entry.result is not None:
                write(_dump(entry) + "\n")
            elif not gaps:
                break
            self._num_written += 1


def read_batch(path: Path, options: Mapping[str, Any], defaults: "DefaultSamplingParams") -> Batch:
    """Read a file of prompts.

    A line is a JSON string, the prompt; or an object that has `prompt`, `prompt_token_ids` or `messages`, any sampling
    parameters, and a `custom_id` if wanted. Empty lines are skipped. A line that is something else fails alone.

    Args:
        path: of the file; `-` is stdin.
        options: sampling parameters that lines may override.
        defaults: the model's, for what neither says.

    Raises:
        UsageError: the file cannot be read, or holds no line.
    """
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"--input: {path} cannot be read: {error.strerror}") from None
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f'--input: {path} holds no prompt; write one per line, such as {{"prompt": "…"}}')
    return Batch([_entry(number, line, options, defaults) for number, line in lines])


def _entry(number: int, line: bytes, options: Mapping[str, Any], defaults: "DefaultSamplingParams") -> _Entry:
    from quire_engine.errors import RequestError
    from quire_engine.sampling_params import convert_parameters

    entry = _Entry({"line": number})
    try:
        said = json.loads(line)
        said = {"prompt": said} if isinstance(said, str) else said
        if not isinstance(said, dict):
            raise ValueError("it must be an object, or a string")
    except RecursionError:
        entry.result = _error("the line is nested too deeply")
        return entry
    except ValueError as error:
        entry.result = _error(f"the line is no JSON that can be used: {' '.join(str(error).split())}")
        return entry
    if "custom_id" in said:
        entry.labels["custom_id"] = said.pop("custom_id")
    given = [name for name in PROMPT_FIELDS if name in said]
    if len(given) != 1:
        entry.result = _error(
            f"the line has {' and '.join(given) or 'no prompt'}; give one of {', '.join(PROMPT_FIELDS)}"
        )
        return entry
    (name,) = given
    value = said.pop(name)
    entry.prompt = value if name == "prompt" else {name: value}
    try:
        if name == "messages" and not isinstance(value, list):
            raise RequestError(name, "messages must be a list of objects with role and content")
        if name == "prompt" and not isinstance(value, str):
            raise RequestError(name, "prompt must be a string")
        entry.params = defaults.complete(convert_parameters({**options, **said}))
    except RequestError as error:
        entry.result = _error(str(error), error.parameter)
    return entry


def _outcome(outcome: "RequestOutput | Exception") -> dict[str, Any]:
    if isinstance(outcome, Exception):
        return _error(str(outcome), getattr(outcome, "parameter", None))
    if outcome.error is not None:
        return _error(outcome.error, outcome.error_parameter)
    return _as_json(outcome)


def _error(message: str, parameter: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "param": parameter}}


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    """vLLM's names, of its `RequestOutput` and `CompletionOutput`."""
    sequences = [{name: getattr(one, name) for name in _SEQUENCE_FIELDS} for one in output.outputs]
    return {**{name: getattr(output, name) for name in _OUTPUT_FIELDS}, "outputs": sequences}


def _dump(entry: _Entry) -> str:
    """One line of ASCII, independent of the locale."""
    import msgspec

    values = msgspec.to_builtins({**entry.labels, **(entry.result or {})}, str_keys=True)
    return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    """The same with null for infinities, which JSON does not have: log-probabilities of impossible tokens."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
