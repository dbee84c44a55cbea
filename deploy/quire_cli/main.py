"""The program `quire`: its commands, and how errors reach the user.

What a command needs beyond its options is imported when it runs.
"""

import io
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from quire_gateway.settings import GatewaySettings
from quire_load.printable import printable
from typer.core import TyperCommand

from quire_cli.bench.commands import bench_app, tune
from quire_cli.console import NonBlockingWriter
from quire_cli.errors import CommandError, UsageError, has_working_directory
from quire_cli.evaluate import TextFile, Window, evaluate
from quire_cli.generate import generate
from quire_cli.join import join
from quire_cli.keys import keys_app
from quire_cli.kv_store import serve_kv_store
from quire_cli.lora import lora_app
from quire_cli.models import model_app
from quire_cli.options import DashboardOptions, Debug, ServeOptions, Settings, usage_errors, with_options

app = typer.Typer(
    name="quire",
    help="Serve language models with NVIDIA Triton Inference Server, and run them without it.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain paragraphs, and half the time to the first line
)

ApiKey = Annotated[
    list[str] | None,
    (
        "KEY",
        "A key that OpenAI's clients must show; may be repeated. Better kept from ps: in a file, or one a line in "
        "QUIRE_OPENAI_API_KEYS.",
    ),
]
ApiKeyFile = Annotated[Path | None, ("FILE", "Such keys, or their hashes, one a line.")]


class GroupedCommand(TyperCommand):
    """Plain help with options in groups, by their `rich_help_panel`. Typer itself has groups only with rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups[getattr(parameter, "rich_help_panel", None) or "Options"].append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def main() -> NoReturn:
    """The `quire` program."""
    _open_standard_streams()
    with _standard_output():
        code = run(sys.argv[1:])
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open /dev/null for standard descriptors that are closed, before a file or socket of ours gets their number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (stays open)


@contextmanager
def _standard_output() -> Iterator[None]:
    """While a program runs: its stdout escapes characters that the encoding lacks. At the end all of it is written.

    Raises:
        SystemExit: it cannot be, as on a full disk. A reader that has gone is no error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    yield
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again when it ends
        if not isinstance(error, BrokenPipeError):
            raise SystemExit(f"quire: stdout cannot be written: {error.strerror}") from None


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        # Without standalone mode, errors come here instead of being printed in a box of several lines.
        return app(args=list(arguments), prog_name="quire", standalone_mode=False) or 0
    except Exception as error:
        if "--debug" in own:
            sys.stderr.write("\n".join(map(printable, traceback.format_exc().split("\n"))))
        code, text = _explain(error)
        NonBlockingWriter(sys.stderr).write(f"quire: {printable(text)}\n")
        return code
    except KeyboardInterrupt:
        print("\nquire: interrupted", file=sys.stderr)
        return 1


def _explain(error: Exception) -> tuple[int, str]:
    """Exit code and message, one line."""
    if isinstance(error, CommandError):
        return error.exit_code, " ".join(str(error).split("\n"))
    if isinstance(error, typer.Abort):
        return 1, "interrupted"
    # A usage error of Click. Typer may bundle a copy of Click, so the class is not always the same.
    message = getattr(error, "format_message", None)
    if message is not None:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "quire"
        return 2, f"{' '.join(message().split()).rstrip('.')}; see {command} --help"
    if isinstance(error, FileNotFoundError) and not has_working_directory():
        return 1, "the working directory no longer exists; change to one that does"
    text = str(error).strip().split("\n")[0]
    return 1, f"{type(error).__name__}: {text}; --debug shows where"


def _version(value: bool) -> None:
    if value:
        from importlib import metadata

        print(f"quire {metadata.version('quire')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _quire(
    context: typer.Context,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    _debug: Debug = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@model_app.callback(invoke_without_command=True)
@keys_app.callback(invoke_without_command=True)
@bench_app.callback(invoke_without_command=True)
def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=GroupedCommand)
@with_options
def serve(options: ServeOptions) -> int:
    """Serve models with tritonserver, and watch over it.

    When every model is loaded, one line on stdout says where: "quire: ready grpc=HOST:PORT http=HOST:PORT …". A port of
    0 is any free one. A server that fails or hangs is started again. SIGTERM, SIGINT and SIGHUP drain; a second one
    stops at once.
    """
    from quire_cli.serve import serve as run_server

    return run_server(options)


app.command()(with_options(join))
app.command("kv-store")(with_options(serve_kv_store))
app.command()(with_options(generate))
app.command("eval")(with_options(evaluate))


@app.command()
@with_options
def quantize(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face checkpoint folder, unquantised.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    quantization: Annotated[str, "int4 or int8."] = "int4",
    calibration: Annotated[Path | None, ("FILE", "A text like those to come, by which int4 loses less.")] = None,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(min=0, help="The most tokens of the text to use; 0: no perplexity.")] = 4096,
    window: Window = 512,
) -> None:
    """Write a copy of a checkpoint whose linear layers are quantised, in compressed-tensors' format.

    It prints the perplexity of a text before and after. If it is interrupted, OUT is not made.
    Example: quire quantize ./Llama-3.2-1B ./Llama-3.2-1B-int4
    """
    from quire_cli.quantize import quantize as run_quantize

    run_quantize(
        path, out, quantization, calibration=calibration, text_file=text, num_tokens=tokens, window=window
    )  # fmt: skip


@app.command()
@with_options
def doctor(
    settings: Settings = None,
    model: Annotated[
        Path | None,
        (
            "PATH",
            "Check this too: a Hugging Face folder, a GGUF file, organisation/name, or the folder of a LoRA adapter.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Show what this machine can run, and what is missing. Exit code 1: `quire serve` cannot work here.

    With --model also whether that checkpoint runs, what its weights and a token's keys and values take of the memory,
    and how many tokens fit. No weights are loaded or downloaded. Example: quire doctor --model ./Llama-3.2-1B
    max_model_len=4096 quantization=int8

    Of the folder of a LoRA adapter, the checkpoint is the one that its adapter_config.json names, if it is on this
    machine. Example: quire doctor --model /adapters/sql
    """
    from quire_cli.demo import resolve_model
    from quire_cli.doctor import examine, examine_model, is_fit
    from quire_cli.model_repository import parse_settings

    engine_settings = parse_settings(settings or [])
    if engine_settings and model is None:
        raise UsageError("settings are given without --model; they are for a checkpoint: give it as well")
    checks = []
    for check in chain(examine(), examine_model(resolve_model(model), engine_settings) if model is not None else ()):
        checks.append(check)
        if not as_json:
            print(printable(str(check)), flush=True)
    if as_json:
        print(json.dumps({"fit": is_fit(checks), "checks": [check.as_dict() for check in checks]}, indent=2))
    return 0 if is_fit(checks) else 1


@app.command()
@with_options
def dashboard(options: DashboardOptions) -> int:
    """Show the operator's dashboard of servers that run already, here or elsewhere.

    It needs a server's gRPC port and its /metrics. To see requests and to cancel them, set QUIRE_INTROSPECTION_TOKEN
    to the model's introspection_token. Where servers have different ones, QUIRE_INTROSPECTION_TOKENS is a JSON object
    from --url to token.
    """
    from quire_cli.dashboard import run_dashboard

    return run_dashboard(options)


@app.command()
@with_options
def top(
    metrics: Annotated[str, ("HOST:PORT", "The server's /metrics.")] = "127.0.0.1:8002",
    health: Annotated[
        str,
        (
            "HOST:PORT",
            "The health address of quire serve, which knows why something is down.  [default: port 8003, if the "
            "server is on this machine]",
        ),
    ] = "",
    interval: Annotated[
        float, typer.Option(min=0.5, max=60.0, metavar="S", help="Seconds between two readings.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Take two readings, print what they say, and end.")] = False,
) -> int:
    """Show a server's models in the terminal: the verdict, and the figures of the dashboard's overview.

    It needs the server's /metrics, says more where quire serve answers, and ends with Ctrl-C. Where standard output is
    no terminal, each reading is printed below the last.
    """
    from quire_cli.dashboard import run_top

    return run_top(metrics, health=health, interval_s=interval, once=once)


@app.command()
@with_options
def openai(settings: GatewaySettings, api_key: ApiKey = None, api_key_file: ApiKeyFile = None) -> int:
    """Serve OpenAI's API in front of a server that runs already, here or elsewhere.

    It needs the server's gRPC port alone; several may stand before one server.
    """
    from quire_cli.openai import read_api_keys, run_gateway

    with usage_errors():
        settings = replace(settings, api_keys=read_api_keys(api_key or (), api_key_file))
    return run_gateway(settings)


for noun, of_noun in {
    "model": model_app, "keys": keys_app, "lora": lora_app, "bench": bench_app,
}.items():  # fmt: skip
    app.add_typer(of_noun, name=noun)
app.command()(with_options(tune))
