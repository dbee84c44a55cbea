"""`quire join`: engines of this host for a model whose front is on another one."""

import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError
from quire_cli.options import JoinOptions


def join(options: JoinOptions) -> int:
    """Run engines that join a model on another host as its replicas.

    The front is a server whose model.json has data_parallel_size, data_parallel_size_local and data_parallel_address.
    Both sides have keys. For each engine that has joined, a line on stdout says: "quire: ready data_parallel_rank=N
    front=HOST:PORT". The front may be serving already; ranks that its data_parallel_size does not count join where its
    data_parallel_max_size leaves room.

    SIGTERM, SIGINT and SIGHUP take the engines away: their requests go on on the others, and the front does not count
    them as down.
    """
    import asyncio

    from quire_backend.settings import load_engine_config
    from quire_engine.errors import EngineError
    from quire_engine.replicas.remote.headless import run_headless
    from quire_engine.system.log_lines import log_to_stderr

    from quire_cli.model_repository import find_repository

    try:
        folder = _version_folder(find_repository(options.model_repository), options.name)
        config = load_engine_config(folder).for_headless(options.start_rank, **options.settings)
    except ValueError as error:
        raise CommandError(str(error)) from None
    log_to_stderr("quire: %(message)s")
    front = f"{config.parallel.data_parallel_address}:{config.parallel.data_parallel_rpc_port}"
    with Console() as console:
        try:
            asyncio.run(_until_stopped(run_headless(
                config, lambda rank: console.announce(f"quire: ready data_parallel_rank={rank} front={front}")
            )))  # fmt: skip
        except (EngineError, ValueError, OSError) as error:
            raise CommandError(str(error)) from None
    return 0


async def _until_stopped(serving: Coroutine[Any, Any, None]) -> None:
    """Await it, or cancel it on SIGTERM, SIGINT or SIGHUP."""
    import asyncio

    task, loop = asyncio.ensure_future(serving), asyncio.get_running_loop()
    is_stopping = False

    def stop() -> None:
        nonlocal is_stopping
        is_stopping = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not is_stopping:
            raise


def _version_folder(repository: Path, name: str | None) -> Path:
    """The folder of the model's newest version, which holds its model.json."""
    from quire_cli.model_repository import newest_version

    names = sorted({path.parent.parent.name for path in repository.glob("*/*/model.json")})
    if not names:
        raise CommandError(f"{repository} holds no model; copy the front's")
    if name is None and len(names) > 1:
        raise UsageError(f"{repository} holds {', '.join(names)}; choose one with --name")
    name = name or names[0]
    if name not in names:
        raise CommandError(f"{repository} holds no model {name}, but {', '.join(names)}")
    folder = newest_version(repository / name)
    if folder is None:
        raise CommandError(
            f"{repository / name} holds no version, a folder named by a number with a model.json; copy the front's"
        )
    return folder
