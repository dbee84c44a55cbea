"""`quire generate`: one prompt, offline and in this process, streamed to the terminal; or many, as JSON."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_load.printable import printable

from quire_cli.batch import Batch, read_batch
from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    from quire_engine import LLM


def generate(
    model: Path,
    prompt: str | None,
    sampling: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    input_file: Path | None = None,
    as_json: bool = False,
) -> None:
    """Generate from one prompt and write the text to stdout as it comes; or from a file of prompts, as JSON lines.

    Args:
        model: a checkpoint's folder.
        prompt: unset: read from stdin.
        sampling: sampling parameters by name; those that are None take their defaults.
        settings: the engine's, as in `model.json`.
        input_file: of prompts, one per line; see `read_batch`.
        as_json: one JSON object instead of the text.

    Raises:
        CommandError: the model cannot be loaded, with these settings on this machine; or a line of the file failed.
        UsageError: a parameter or setting has a bad value, or there is no prompt.
    """
    from quire_engine.config import EngineConfig
    from quire_engine.errors import EngineError, RequestError
    from quire_engine.frontend.default_sampling_params import read_default_sampling_params
    from quire_engine.models import check_checkpoint
    from quire_engine.sampling_params import convert_parameters

    if input_file is not None and prompt is not None:
        raise UsageError("--prompt and --input are both given; give one of them")
    # Errors are found before the seconds that loading takes.
    try:
        given = convert_parameters(sampling)
        config = EngineConfig.from_settings({"model": str(model), **settings})
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
            with loaded_engine(model, settings) as llm:
                batch.run(llm, Console(), _write)
            return
        text = read_prompt() if prompt is None else _decoded(os.fsencode(prompt), "--prompt")
        if not text:
            raise UsageError("the prompt is empty; give --prompt TEXT, or write it to stdin")
        with loaded_engine(model, settings) as llm:
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
