"""`quire model scale`, `sleep`, `wake`, `update-weights`, `reset-cache` and `list --url`: the models of a server that
runs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quire_engine.system.extras import missing_package

from quire_cli.console import Console, waiting_line
from quire_cli.dashboard import INTROSPECTION_TOKEN
from quire_cli.errors import CommandError

if TYPE_CHECKING:
    from quire_client import AsyncClient

_T = TypeVar("_T")

_NEEDS = ("tritonclient", "grpc")
_TICK_S = 0.2


def scale(model: str, num_replicas: int, url: str) -> None:
    """Change the number of a model's replicas, wait until it has changed, and print the result on stdout.

    Args:
        model: its name.
        num_replicas: on the server's own host.
        url: `host:port` of the server's gRPC.

    Raises:
        CommandError: the server is away; the model has rejected it, and has as many replicas as before; or Ctrl-C.
    """
    answer = _ask(model, url, f"waiting for {num_replicas} replicas", lambda client: client.scale(model, num_replicas))
    present, before, others = answer.replicas, answer.before, answer.of_other_hosts
    count = f"{present} {'replica' if present == 1 else 'replicas'}" + (
        " on its own host" if others is not None else ""
    )
    text = f"quire: {model} has {count}" + (" already" if present == before else f", and had {before}")
    if others is not None:
        text += f"; {others or 'none'} of other hosts {'is' if others < 2 else 'are'} up"
    print(text)


def sleep(model: str, level: int, mode: str, url: str) -> None:
    """Put a model to sleep, and print that it sleeps. Raises CommandError like `scale`."""
    _ask(model, url, "waiting for it to sleep", lambda client: client.sleep(model, level, mode))
    print(f"quire: {model} sleeps; quire model wake {model} wakes it up")


def wake(model: str, url: str) -> None:
    """Wake a model up, and print that it is awake. Raises CommandError like `scale`."""
    _ask(model, url, "waiting for it to wake up", lambda client: client.wake_up(model))
    print(f"quire: {model} is awake")


def update_weights(model: str, folder: Path, url: str) -> None:
    """Have a model use the weights of a folder, and print it. Raises CommandError like `scale`."""
    path = str(folder.absolute())
    _ask(
        model,
        url,
        "waiting for its requests to end, and for the weights",
        lambda client: client.update_weights(model, path),
    )
    print(f"quire: {model} has the weights of {path}")


def reset_cache(model: str, url: str) -> None:
    """Clear a model's prefix cache, and print it. Raises CommandError like `scale`."""
    _ask(model, url, "waiting for its engine", lambda client: client.reset_prefix_cache(model))
    print(f"quire: {model} has an empty prefix cache")


def list_models(url: str) -> list[dict[str, str]]:
    """The models that a server has ready, each with the state of its engine.

    Raises:
        CommandError: the server is away.
    """
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

    try:
        with Client(url) as client:
            return [{"name": model, "engine": state(client, model)} for model in client.models()]
    except Disconnected as error:
        raise CommandError(f"{error} name it with --url HOST:PORT") from None
    except ClientError as error:
        raise CommandError(" ".join(str(error).split())) from None


def check_packages() -> None:
    """Raise CommandError if the packages of a client are missing."""
    missing = missing_package("server", *_NEEDS)
    if missing:
        raise CommandError(missing)


def _ask(model: str, url: str, waits_for: str, call: "Callable[[AsyncClient], Coroutine[None, None, _T]]") -> _T:
    check_packages()
    try:
        return asyncio.run(_answer(model, url, waits_for, call))
    except KeyboardInterrupt:
        raise CommandError("interrupted; what the model has begun, it brings to its end") from None


async def _answer(
    model: str, url: str, waits_for: str, call: "Callable[[AsyncClient], Coroutine[None, None, _T]]"
) -> _T:
    """The model's answer, which comes once it is so."""
    from quire_client import AsyncClient

    async with AsyncClient(url) as client:
        asking = asyncio.create_task(call(client))
        with waiting_line(Console(), f"{model}: {waits_for}") as waiting:
            while not asking.done():
                waiting.tick()
                await asyncio.wait([asking], timeout=_TICK_S)
        with rejections(model):
            return await asking


@contextmanager
def rejections(model: str) -> Iterator[None]:
    """What a model answers to an operator's request, as errors of a command.

    Raises:
        CommandError: the server is away, or the model has rejected it.
    """
    from quire_client import ClientError, Disconnected

    try:
        yield
    except Disconnected as error:
        raise CommandError(f"{error} name it with --url HOST:PORT") from None
    except ClientError as error:
        hint = ""
        if "introspection_token is missing" in str(error):
            hint = f"; set {INTROSPECTION_TOKEN}; where quire serve has made one up, start that with one of yours"
        raise CommandError(f"{model}: {' '.join(str(error).split())}{hint}") from None
