"""`quire generate`: one prompt, offline and in this process, streamed to the terminal; or many, as JSON."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from quire_load.printable import printable

from quire_cli.batch import Batch, read_batch
from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError
from quire_cli.options import Checkpoint, Settings, Yes

if TYPE_CHECKING:
    from quire_engine import LLM


def generate(
    model: Checkpoint,
    settings: Settings = None,
    prompt: Annotated[str | None, ("TEXT", "Default: read from stdin.")] = None,
    input_file: Annotated[Path | None, ("--input", "FILE", "Many prompts, one per line; - is stdin.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the text.")] = False,
    max_tokens: Annotated[int, "The most tokens to generate."] = 128,
    min_tokens: Annotated[int | None, "No end before this many tokens."] = None,
    temperature: Annotated[float | None, "0 is greedy; default: the checkpoint's, else 1."] = None,
    top_p: Annotated[float | None, "The most likely tokens up to this sum."] = None,
    top_k: Annotated[int | None, "Only the k most likely tokens."] = None,
    min_p: Annotated[float | None, "Drop tokens less likely than this share of the first."] = None,
    seed: Annotated[int | None, "Makes the text reproducible."] = None,
    stop: Annotated[list[str] | None, "Ends the text; may be repeated."] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the text.")] = False,
    yes: Yes = False,
) -> None:
    """Generate text from one prompt, with no server, and stream it to stdout.

    With --json it is one JSON object, with prompt, prompt_token_ids and outputs (text, token_ids, finish_reason, …).

    With --input FILE, each line is a JSON object with prompt, prompt_token_ids or messages; it may have a custom_id,
    and sampling parameters, which win over the options here. For each line, one such object goes to stdout, in their
    order, with its line and custom_id, or with an error. Exit code 1: some failed; the others are done.
    """
    from quire_engine.config import EngineConfig
    from quire_engine.errors import EngineError, RequestError
    from quire_engine.frontend.default_sampling_params import read_default_sampling_params
    from quire_engine.models import check_checkpoint
    from quire_engine.sampling_params import convert_parameters

    from quire_cli.demo import resolve_model
    from quire_cli.model_repository import parse_settings

    sampling: dict[str, Any] = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "min_p": min_p, "seed": seed, "stop": stop or None, "ignore_eos": ignore_eos,
    }  # fmt: skip
    model, engine_settings = resolve_model(model, yes=yes), parse_settings(settings or [])
    if input_file is not None and prompt is not None:
        raise UsageError("--prompt and --input are both given; give one of them")
    # Errors are found before the seconds that loading takes.
    try:
        given = convert_parameters(sampling)
        config = EngineConfig.from_settings({"model": str(model), **engine_settings})
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        tokenizer, drafts = Path(config.model.tokenizer_path), config.scheduler.draft_checkpoint
        check_checkpoint(Path(config.model.model), tokenizer, config.model.load_format, drafts, config.model.model_impl)
        defaults = read_default_sampling_params(
            config.model.model, config.frontend.generation_config, config.frontend.override_generation_config
        )
        sampling_params = defaults.complete(given)
        if input_file is not None:
            batch = read_batch(input_file, sampling, defaults)
            with loaded_engine(model, engine_settings) as llm:
                batch.run(llm, Console(), _write)
            return
        text = read_prompt() if prompt is None else _decoded(os.fsencode(prompt), "--prompt")
        if not text:
            raise UsageError("the prompt is empty; give --prompt TEXT, or write it to stdin")
        with loaded_engine(model, engine_settings) as llm:
            if as_json:
                _write(Batch.of(text, sampling_params).only_result(llm) + "\n")
                return
            for output in llm.stream(text, sampling_params):
                _write(output.outputs[0].text)
            _write("\n")
    except RequestError as error:
        raise UsageError(str(error)) from error
    except (EngineError, ValueError) as error:
        raise CommandError(str(error)) from error


@contextmanager
def loaded_engine(model: Path, settings: Mapping[str, Any]) -> "Iterator[LLM]":
    """The engine as a context; shows the progress of loading it.

    Raises:
        EngineError, ValueError: the model cannot be loaded, with these settings on this machine.
    """
    from quire_engine.models.progress import reported_progress

    with (
        waiting_line(Console(), f"loading {model}", announce=False) as waiting,
        reported_progress(waiting.tick),
    ):
        from quire_engine import LLM

        llm = LLM(model=str(model), **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


def read_prompt() -> str:
    """All of stdin, without the line end that shells add.

    Raises:
        UsageError: it is not UTF-8.
    """
    if sys.stdin.isatty():
        Console().line("quire: type the prompt, then Ctrl-D")
    # Bytes, so that the text does not depend on the locale, nor holds surrogates.
    return _decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def _decoded(text: bytes, source: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt of {source} is not valid UTF-8 at byte {error.start}; convert it") from None


def _write(text: str) -> None:
    try:
        if sys.stdout.isatty():  # a model writes what it likes
            text = "\n".join(map(printable, text.split("\n")))
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader has closed the pipe: the command ends silently
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again when it ends
        raise CommandError(f"the text cannot be written to stdout: {error.strerror}") from None
