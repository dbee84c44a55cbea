"""`quire model …`: the models of a repository, and of a server that runs."""

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from quire_load.printable import printable

from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError
from quire_cli.options import SERVER_GRPC, ServedModel, Settings, Url, Yes, with_options

if TYPE_CHECKING:
    from quire_client import AsyncClient

_T = TypeVar("_T")
_NEEDS = ("tritonclient", "grpc")
_TICK_S = 0.2

model_app = typer.Typer(help="Models: of a model repository, and of a server that runs.", rich_markup_mode=None)


@model_app.command("add")
@with_options
def add(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A Hugging Face folder, a GGUF file, or demo.")],
    settings: Settings = None,
    name: Annotated[str | None, "Name of the model; default: the folder's."] = None,
    model_repository: Annotated[Path, ("DIR", "Is made when it does not exist.")] = Path("model_repository"),
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
def list_models(
    model_repository: Annotated[
        Path | None, ("DIR", "Default: that of quire serve, ./model_repository or tinypy's.")
    ] = None,
    url: Annotated[str, ("HOST:PORT", "A server's gRPC: list what it serves instead.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout instead of the table.")] = False,
) -> None:
    """List the models of a repository, with version and checkpoint; or those of a server, with their engines' health.

    Example: quire model list --url 127.0.0.1:8001
    """
    from quire_cli.model_repository import describe_model, find_repository, models_of

    if url and model_repository is not None:
        raise UsageError("--url and --model-repository are both given; give one of them")
    models: Sequence[Mapping[str, str | None]] = (
        _served(url) if url else [describe_model(model) for model in models_of(find_repository(model_repository))]
    )
    if as_json:
        print(json.dumps(models, indent=2))
        return
    for row in models:
        name, *others = (printable(value or "-") for value in row.values())
        print(f"{name:20} {'  '.join(others)}")


@model_app.command("scale")
@with_options
def scale(
    model: ServedModel,
    replicas: Annotated[int, typer.Argument(metavar="N", min=1, help="How many replicas it is to have.")],
    url: Url = SERVER_GRPC,
) -> None:
    """Have more or fewer replicas of a model that a server serves, while it serves. No request fails.

    It returns when it is so. New ones get requests once all of them are ready; if one does not start, all is as before.
    Those that leave hand their requests over to the others at once, and these go on with the same tokens.

    Of a model with replicas on several hosts, N is how many the server's own host has. Those of other hosts come when
    they join (quire join), and leave when they are asked to end (SIGTERM).

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. A model that is loaded again has
    data_parallel_size replicas, as its model.json says. Example: quire model scale tinypy 2
    """
    answer = _ask(model, url, f"waiting for {replicas} replicas", lambda client: client.scale(model, replicas))
    present, before, others = answer.replicas, answer.before, answer.of_other_hosts
    count = f"{present} {'replica' if present == 1 else 'replicas'}{'' if others is None else ' on its own host'}"
    text = f"quire: {model} has {count}" + (" already" if present == before else f", and had {before}")
    if others is not None:
        text += f"; {others or 'none'} of other hosts {'is' if others < 2 else 'are'} up"
    print(text)


@model_app.command("sleep")
@with_options
def sleep(
    model: ServedModel,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 frees the KV cache, 2 the weights as well, which are then read again.")
    ] = 1,
    mode: Annotated[str, ("wait|abort", "What happens to requests that run.")] = "wait",
    url: Url = SERVER_GRPC,
) -> None:
    """Free the memory of a model that a server serves, until it is woken up.

    It returns when it is so. Requests that run end first; new ones are rejected, or with wake_on_request wake it up. On
    a GPU, level 1 keeps the weights in the host's memory.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. Example: quire model sleep tinypy --level 2
    """
    if mode not in ("wait", "abort"):
        raise UsageError(f"--mode is {mode!r}; it must be wait or abort")
    _ask(model, url, "waiting for it to sleep", lambda client: client.sleep(model, level, mode))
    print(f"quire: {model} sleeps; quire model wake {model} wakes it up")


@model_app.command("wake")
@with_options
def wake(model: ServedModel, url: Url = SERVER_GRPC) -> None:
    """Wake up a model that sleeps. It returns when requests are served again, with the same tokens as before.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. Example: quire model wake tinypy
    """
    _ask(model, url, "waiting for it to wake up", lambda client: client.wake_up(model))
    print(f"quire: {model} is awake")


@model_app.command("update-weights")
@with_options
def update_weights(
    model: ServedModel,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint on the server's host.")],
    url: Url = SERVER_GRPC,
) -> None:
    """Have a model that a server serves use the weights of another folder, without a restart.

    The folder has to hold a checkpoint of the same architecture and shapes, with the same tokenizer. Requests that run
    end first, with the weights that there are; new ones are held meanwhile, and none fails. If the weights cannot be
    loaded, those that there are go on serving. An engine that dies is started with the new ones, so the folder has to
    stay. A model that is loaded again has the weights that its model.json names.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token.
    Example: quire model update-weights tinypy ./step-2
    """
    path, waits_for = str(folder.absolute()), "waiting for its requests to end, and for the weights"
    _ask(model, url, waits_for, lambda client: client.update_weights(model, path))
    print(f"quire: {model} has the weights of {path}")


@model_app.command("reset-cache")
@with_options
def reset_cache(model: ServedModel, url: Url = SERVER_GRPC) -> None:
    """Clear the prefix cache of a model that a server serves. Requests that run go on.

    QUIRE_INTROSPECTION_TOKEN has to be the model's introspection_token. Example: quire model reset-cache tinypy
    """
    _ask(model, url, "waiting for its engine", lambda client: client.reset_prefix_cache(model))
    print(f"quire: {model} has an empty prefix cache")


def _served(url: str) -> list[dict[str, str]]:
    """The models that a server has ready, each with the state of its engine. Raises CommandError if it is away."""
    check_packages()
    from quire_client import Client, ClientError, Disconnected

    def state(client: Client, model: str) -> str:
        try:
            if not client.health(model):
                return "unhealthy"
            return "asleep" if client.is_sleeping(model) else "healthy"
        except Disconnected:
            raise
        except ClientError:
            return "unknown"  # another backend's

    with rejections(), Client(url) as client:
        return [{"name": model, "engine": state(client, model)} for model in client.models()]


def check_packages() -> None:
    """Raise CommandError if the packages of a client are missing."""
    from quire_engine.system.extras import missing_package

    missing = missing_package("server", *_NEEDS)
    if missing:
        raise CommandError(missing)


def _ask(model: str, url: str, waits_for: str, call: "Callable[[AsyncClient], Coroutine[None, None, _T]]") -> _T:
    """The model's answer, which comes once it is so.

    Raises:
        CommandError: the server is away; the model has rejected it, and is as before; or Ctrl-C.
    """
    import asyncio

    check_packages()
    from quire_client import AsyncClient

    async def answer() -> _T:
        async with AsyncClient(url) as client:
            asking = asyncio.create_task(call(client))
            with waiting_line(Console(), f"{model}: {waits_for}") as waiting:
                while not asking.done():
                    waiting.tick()
                    await asyncio.wait([asking], timeout=_TICK_S)
            with rejections(f"{model}: "):
                return await asking

    try:
        return asyncio.run(answer())
    except KeyboardInterrupt:
        raise CommandError("interrupted; what the model has begun, it brings to its end") from None


@contextmanager
def rejections(prefix: str = "") -> Iterator[None]:
    """What a server or a model answers to an operator's request, as errors of a command.

    Args:
        prefix: of what a model has said.

    Raises:
        CommandError: the server is away, or the model has rejected it.
    """
    from quire_client import ClientError, Disconnected
    from quire_client.client import TOKEN_VARIABLE

    try:
        yield
    except Disconnected as error:
        raise CommandError(f"{error} name it with --url HOST:PORT") from None
    except ClientError as error:
        hint = ""
        if "introspection_token is missing" in str(error):
            hint = f"; set {TOKEN_VARIABLE}; where quire serve has made one up, start that with one of yours"
        raise CommandError(f"{prefix}{' '.join(str(error).split())}{hint}") from None
