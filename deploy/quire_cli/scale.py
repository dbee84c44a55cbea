"""`quire model scale` and `quire model list --url`: the models of a server that runs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire_engine.system.extras import missing_package

from quire_cli.console import Console, waiting_line
from quire_cli.dashboard import INTROSPECTION_TOKEN
from quire_cli.errors import CommandError

if TYPE_CHECKING:
    from quire_client import Scaled

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
    check_packages()
    try:
        answer = asyncio.run(_ask(model, num_replicas, url))
    except KeyboardInterrupt:
        raise CommandError("interrupted; what the model has begun, it brings to its end") from None
    present, before, others = answer.replicas, answer.before, answer.of_other_hosts
    count = f"{present} {'replica' if present == 1 else 'replicas'}" + (
        " on its own host" if others is not None else ""
    )
    text = f"quire: {model} has {count}" + (" already" if present == before else f", and had {before}")
    if others is not None:
        text += f"; {others or 'none'} of other hosts {'is' if others < 2 else 'are'} up"
    print(text)


def list_models(url: str) -> list[dict[str, str]]:
    """The models that a server has ready, each with the state of its engine.

    Raises:
        CommandError: the server is away.
    """
    check_packages()
    from quire_client import Client, ClientError, Disconnected

    def state(client: Client, model: str) -> str:
        try:
            return "healthy" if client.health(model) else "unhealthy"
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


async def _ask(model: str, num_replicas: int, url: str) -> "Scaled":
    """The model's answer, which comes once new replicas have started."""
    from quire_client import AsyncClient

    async with AsyncClient(url) as client:
        asking = asyncio.create_task(client.scale(model, num_replicas))
        with waiting_line(Console(), f"{model}: waiting for {num_replicas} replicas") as waiting:
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
