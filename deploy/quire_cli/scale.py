"""`quire scale`: more or fewer replicas of a model, on a server that runs. The model does it; this asks it to."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_engine.system.extras import missing_package

from quire_cli.console import Console, waiting_line
from quire_cli.dashboard import INTROSPECTION_TOKEN
from quire_cli.errors import CommandError

if TYPE_CHECKING:
    from quire_client import Scaled

_NEEDS = ("tritonclient", "grpc")
_TICK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleOptions:
    """Of what, on which server, there are to be how many."""

    model: str
    num_replicas: int
    url: str = "127.0.0.1:8001"
    """Of the server's gRPC."""


def scale(options: ScaleOptions) -> None:
    """Have the model change the number of its replicas, and wait until it has. Says on stdout what has become of it.

    Of a model with replicas on several hosts, they are those of the server's own host.

    Raises:
        CommandError: the server is away, the model has refused, and then its replicas are as they were, or Ctrl-C.
    """
    missing = missing_package("server", *_NEEDS)
    if missing:
        raise CommandError(missing)
    try:
        answer = asyncio.run(_ask(options))
    except KeyboardInterrupt:
        raise CommandError("interrupted; what the model has begun, it brings to its end") from None
    present, before, others = answer.replicas, answer.before, answer.of_other_hosts
    count = f"{present} {'replica' if present == 1 else 'replicas'}" + (
        " on its own host" if others is not None else ""
    )
    text = f"quire: {options.model} has {count}" + (" already" if present == before else f", and had {before}")
    if others is not None:
        text += f"; {others or 'none'} of other hosts {'is' if others < 2 else 'are'} up"
    print(text)


async def _ask(options: ScaleOptions) -> "Scaled":
    """The model's answer, for which it takes as long as new replicas take to start."""
    from quire_client import AsyncClient, ClientError, Disconnected

    async with AsyncClient(options.url) as client:
        asking = asyncio.create_task(client.scale(options.model, options.num_replicas))
        with waiting_line(Console(), f"{options.model}: {options.num_replicas} replicas are wanted") as waiting:
            while not asking.done():
                waiting.tick()
                await asyncio.wait([asking], timeout=_TICK_S)
        try:
            return await asking
        except Disconnected as error:
            raise CommandError(f"{error} name it with --url HOST:PORT") from None
        except ClientError as error:
            hint = ""
            if "introspection_token is missing" in str(error):
                hint = f"; set {INTROSPECTION_TOKEN}; where quire serve has made one up, start that with one of yours"
            raise CommandError(f"{options.model}: {' '.join(str(error).split())}{hint}") from None
