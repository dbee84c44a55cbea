"""The commands of `quire`, their options, and how errors reach the user.

Each command's work is in a module of its own, imported when the command runs.
"""

import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from quire_gateway.limits import RequestLimits
from quire_load.printable import printable
from typer.core import TyperCommand

from quire_cli.bench import Settings, bench_app, tune
from quire_cli.console import NonBlockingWriter
from quire_cli.errors import CommandError, UsageError, has_working_directory
from quire_cli.lora import lora_app
from quire_cli.options import DashboardOptions, Debug, JoinOptions, ServeOptions, usage_errors, with_options

app = typer.Typer(
    name="quire",
    help="Serve language models with NVIDIA Triton Inference Server, and run them without it.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain paragraphs, and half the time to the first line
)
model_app = typer.Typer(help="Models: of a model repository, and of a server that runs.", rich_markup_mode=None)
keys_app = typer.Typer(help="Keys: of hosts, and of the OpenAI gateway's clients.", rich_markup_mode=None)

RENAMED = {
    ("serve", "--headless"): ("join",),
    ("scale",): ("model", "scale"),
    ("key",): ("keys", "host"),
    ("api-key",): ("keys", "api"),
}
"""Command and options that were renamed → their new words. The old ones still work, in this version."""

ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="A key that OpenAI's clients must show; may be repeated. Better kept from ps: in a file, or one a line in "
        "QUIRE_OPENAI_API_KEYS.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Download the demo model without asking, if it is not here.")]
ApiKeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Such keys, or their hashes, one a line.")]
TextFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="UTF-8. Default: the language reference that comes with Python.")
]
Window = Annotated[int, typer.Option(min=4, help="Tokens of a window, the second half of which is scored.")]
_SERVED_MODEL = typer.Argument(metavar="MODEL", help="Name of the model, as the server has it.")
_GRPC = typer.Option(metavar="HOST:PORT", help="The server's gRPC.")


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
    sys.exit(run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """Open /dev/null for standard descriptors that are closed, before a file or socket of ours gets their number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (stays open)


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    arguments = _with_new_names(arguments, own)
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


def _with_new_names(arguments: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """The command line with the command's new name, and a warning if it has an old one."""
    at = next((i for i, argument in enumerate(own) if not argument.startswith("-")), 0)
    for (command, *options), new in RENAMED.items():
        if own[at : at + 1] == [command] and set(options) <= set(own):
            old, now = " ".join(["quire", command, *options]), " ".join(["quire", *new])
            NonBlockingWriter(sys.stderr).write(f"quire: {old} is now {now}; the next version has no {old}\n")
            return [*arguments[:at], *new, *(word for word in arguments[at + 1 :] if word not in options)]
    return arguments


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


@app.command()
@with_options
def join(options: JoinOptions) -> int:
    """Run engines that join a model on another host as its replicas.

    The front is a server whose model.json has data_parallel_size, data_parallel_size_local and data_parallel_address.
    Both sides have keys. For each engine that has joined, a line on stdout says: "quire: ready data_parallel_rank=N
    front=HOST:PORT". The front may be serving already; ranks that its data_parallel_size does not count join where its
    data_parallel_max_size leaves room.

    SIGTERM, SIGINT and SIGHUP take the engines away: their requests go on on the others, and the front does not count
    them as down.
    """
    from quire_cli.join import join as run_join

    return run_join(options)


@keys_app.command("host")
@with_options
def keys_host(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where this host's keys are, or are to be.")],
    trust: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="The public key of another host; may be repeated.")
    ] = None,
) -> None:
    """Make the keys by which engines on several hosts know each other, and print this host's public key.

    The file (data_parallel_key_file) is for its owner alone to read, and stays on its host. The front's trusts the
    hosts whose engines may join; each of theirs trusts the front. What it holds already stays.
    """
    from quire_cli.join import make_keys

    make_keys(file, trust or ())


@keys_app.command("api")
@with_options
def keys_api(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The client's name; the gateway's /metrics show it.")],
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Default: any number.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Of prompts and answers.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at a time.")] = None,
) -> None:
    """Make a key for the OpenAI gateway: what a file of keys keeps goes to stdout, and the key to stderr.

    Example: quire keys api batch --requests-per-minute 60 >> keys; then quire serve --api-key-file keys
    """
    from quire_cli.openai import print_new_key

    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
              "max_concurrent": max_concurrent}  # fmt: skip
    print_new_key(name, limits)


@app.command("kv-store")
@with_options
def kv_store(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the blocks are kept. Is made when missing.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="An address or a name of this host.")],
    key_file: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="This host's keys, which trust those of the engines' hosts: quire keys host."
        ),
    ],
    max_bytes: Annotated[int, typer.Option(help="Of all blocks; those not used for longest make room.")] = 16 << 30,
) -> None:
    """Keep KV blocks for engines of other hosts, which have kv_transfer_config with RemoteStorageConnector.

    Engines go on without it while it is away. Example: quire kv-store /var/cache/quire-kv --listen 10.0.0.5:29600
    --key-file /etc/quire/keys.json
    """
    from quire_cli.kv_store import serve_kv_store

    raise typer.Exit(serve_kv_store(folder, listen, key_file, max_bytes))


@model_app.command("add")
@with_options
def model_add(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face folder, a GGUF file, or demo.")],
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; default: the folder's.")] = None,
    model_repository: Annotated[Path, typer.Option(metavar="DIR", help="Is made when it does not exist.")] = Path(
        "model_repository"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a model of that name.")] = False,
    yes: Yes = False,
) -> None:
    """Check a checkpoint, and write its config.pbtxt and 1/model.json into a model repository.

    The weights stay where they are. Example: quire model add ./Llama-3.2-1B max_model_len=4096 dtype=bfloat16
    """
    from quire_cli.demo import NAME, is_demo, resolve_model
    from quire_cli.model_repository import parse_settings, write_model

    if is_demo(path):
        path, name = resolve_model(path, yes=yes), name or NAME
    folder = write_model(model_repository, path, name, parse_settings(settings or []), force=force)
    print(f"quire: wrote {folder}; serve it with: quire serve --model-repository {model_repository}")


@model_app.command("list")
@with_options
def model_list(
    model_repository: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: that of quire serve, ./model_repository or tinypy's.")
    ] = None,
    url: Annotated[str, typer.Option(metavar="HOST:PORT", help="A server's gRPC: list what it serves instead.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout instead of the table.")] = False,
) -> None:
    """List the models of a repository, with version and checkpoint; or those of a server, with their engines' health.

    Example: quire model list --url 127.0.0.1:8001
    """
    from quire_cli.model_repository import describe_model, find_repository, models_of
    from quire_cli.scale import list_models

    if url and model_repository is not None:
        raise UsageError("--url and --model-repository are both given; give one of them")
    models: Sequence[Mapping[str, str | None]] = (
        list_models(url) if url else [describe_model(model) for model in models_of(find_repository(model_repository))]
    )
    if as_json:
        print(json.dumps(models, indent=2))
        return
    for row in models:
        name, *others = (printable(value or "-") for value in row.values())
        print(f"{name:20} {'  '.join(others)}")


@model_app.command("scale")
@with_options
def model_scale(
    model: Annotated[str, _SERVED_MODEL],
    replicas: Annotated[int, typer.Argument(metavar="N", min=1, help="How many replicas it is to have.")],
    url: Annotated[str, _GRPC] = "127.0.0.1:8001",
) -> None:
    """Have more or fewer replicas of a model that a server serves, while it serves. No request fails.

    It returns when it is so. New ones get requests once all of them are ready; if one does not start, all is as before.
    Those that leave hand their requests over to the others at once, and these go on with the same tokens.

    Of a model with replicas on several hosts, N is how many the server's own host has. Those of other hosts come when
    they join (quire join), and leave when they are asked to end (SIGTERM).

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. A model that is loaded again has
    data_parallel_size replicas, as its model.json says. Example: quire model scale tinypy 2
    """
    from quire_cli.scale import scale as run_scale

    run_scale(model, replicas, url)


@model_app.command("sleep")
@with_options
def model_sleep(
    model: Annotated[str, _SERVED_MODEL],
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 frees the KV cache, 2 the weights as well, which are then read again.")
    ] = 1,
    mode: Annotated[str, typer.Option(metavar="wait|abort", help="What happens to requests that run.")] = "wait",
    url: Annotated[str, _GRPC] = "127.0.0.1:8001",
) -> None:
    """Free the memory of a model that a server serves, until it is woken up.

    It returns when it is so. Requests that run end first; new ones are rejected, or with wake_on_request wake it up. On
    a GPU, level 1 keeps the weights in the host's memory.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. Example: quire model sleep tinypy --level 2
    """
    from quire_cli.scale import sleep

    if mode not in ("wait", "abort"):
        raise UsageError(f"--mode is {mode!r}; it must be wait or abort")
    sleep(model, level, mode, url)


@model_app.command("wake")
@with_options
def model_wake(
    model: Annotated[str, _SERVED_MODEL],
    url: Annotated[str, _GRPC] = "127.0.0.1:8001",
) -> None:
    """Wake up a model that sleeps. It returns when requests are served again, with the same tokens as before.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. Example: quire model wake tinypy
    """
    from quire_cli.scale import wake

    wake(model, url)


@model_app.command("update-weights")
@with_options
def model_update_weights(
    model: Annotated[str, _SERVED_MODEL],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint on the server's host.")],
    url: Annotated[str, _GRPC] = "127.0.0.1:8001",
) -> None:
    """Have a model that a server serves use the weights of another folder, without a restart.

    The folder has to hold a checkpoint of the same architecture and shapes, with the same tokenizer. Requests that run
    end first, with the weights that there are; new ones are held meanwhile, and none fails. If the weights cannot be
    loaded, those that there are go on serving. An engine that dies is started with the new ones, so the folder has to
    stay. A model that is loaded again has the weights that its model.json names.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token.
    Example: quire model update-weights tinypy ./step-2
    """
    from quire_cli.scale import update_weights

    update_weights(model, folder, url)


@model_app.command("reset-cache")
@with_options
def model_reset_cache(
    model: Annotated[str, _SERVED_MODEL],
    url: Annotated[str, _GRPC] = "127.0.0.1:8001",
) -> None:
    """Clear the prefix cache of a model that a server serves. Requests that run go on.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. Example: quire model reset-cache tinypy
    """
    from quire_cli.scale import reset_cache

    reset_cache(model, url)


@app.command()
@with_options
def generate(
    model: Annotated[Path, typer.Option(metavar="PATH", help="A Hugging Face folder, a GGUF file, or demo.")],
    settings: Settings = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Default: read from stdin.")] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="Many prompts, one per line; - is stdin.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the text.")] = False,
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 128,
    min_tokens: Annotated[int | None, typer.Option(help="No end before this many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the checkpoint's, else 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="The most likely tokens up to this sum.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the text reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the text.")] = False,
    yes: Yes = False,
) -> None:
    """Generate text from one prompt, with no server, and stream it to stdout.

    With --json it is one JSON object, with prompt, prompt_token_ids and outputs (text, token_ids, finish_reason, …).

    With --input FILE, each line is a JSON object with prompt, prompt_token_ids or messages; it may have a custom_id,
    and sampling parameters, which win over the options here. For each line, one such object goes to stdout, in their
    order, with its line and custom_id, or with an error. Exit code 1: some failed; the others are done.
    """
    from quire_cli.demo import resolve_model
    from quire_cli.generate import generate as run_generate
    from quire_cli.model_repository import parse_settings

    sampling: dict[str, Any] = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "min_p": min_p, "seed": seed, "stop": stop or None, "ignore_eos": ignore_eos,
    }  # fmt: skip
    model = resolve_model(model, yes=yes)
    run_generate(model, prompt, sampling, parse_settings(settings or []), input_file=input_file, as_json=as_json)


@app.command("eval")
@with_options
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face checkpoint folder.")],
    settings: Settings = None,
    text: TextFile = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Compare the predictions with those of this checkpoint.")
    ] = None,
    reference_setting: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting for the reference; may be repeated.")
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
    from quire_cli.evaluate import evaluate as run_evaluate
    from quire_cli.model_repository import parse_settings

    run_evaluate(
        path, parse_settings(settings or []), text_file=text, reference=reference,
        reference_settings=parse_settings(reference_setting or []), num_tokens=tokens, window=window, as_json=as_json,
    )  # fmt: skip


@app.command()
@with_options
def quantize(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face checkpoint folder, unquantised.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    quantization: Annotated[str, typer.Option(help="int4 or int8.")] = "int4",
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text like those to come, by which int4 loses less.")
    ] = None,
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
        typer.Option(
            metavar="PATH",
            help="Check this too: a Hugging Face folder, a GGUF file, organisation/name, or "
            "the folder of a LoRA adapter.",
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
    metrics: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's /metrics.")] = "127.0.0.1:8002",
    health: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="The health address of quire serve, which knows why something is down.  [default: port 8003, if the "
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
def openai(
    *,
    url: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's gRPC.")] = "127.0.0.1:8001",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT")] = 9000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    limits: RequestLimits,
    ignore_field: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A field of bodies to leave out; may be repeated.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Browsers let pages of this origin, such as https://app.example, use it; * for any."
        ),
    ] = None,
    allowed_media_domain: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Fetch images from URLs of this host; may be repeated. Else of none."),
    ] = None,
    drain_timeout: Annotated[
        int, typer.Option(min=0, max=86400, metavar="S", help="Seconds that running requests get when asked to stop.")
    ] = 30,
) -> int:
    """Serve OpenAI's API in front of a server that runs already, here or elsewhere.

    It needs the server's gRPC port alone; several may stand before one server.
    """
    from quire_gateway.settings import GatewaySettings

    from quire_cli.openai import read_api_keys, run_gateway

    with usage_errors():
        settings = GatewaySettings(
            url=url, host=host, port=port, api_keys=read_api_keys(api_key or (), api_key_file), limits=limits,
            drain_timeout_s=drain_timeout, ignored_fields=tuple(ignore_field or ()),
            cors_origins=tuple(cors_origin or ()), allowed_media_domains=tuple(allowed_media_domain or ()),
        )  # fmt: skip
    return run_gateway(settings)


app.add_typer(model_app, name="model")
app.add_typer(keys_app, name="keys")
app.add_typer(lora_app, name="lora")
app.add_typer(bench_app, name="bench")
app.command()(with_options(tune))
