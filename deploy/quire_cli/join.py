"""`quire join`: engines of this host for a model whose front is on another one. And `quire keys host`."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError
from quire_cli.model_repository import find_repository, newest_version
from quire_cli.options import JoinOptions


def join(options: JoinOptions) -> int:
    """Run engines until a signal ends them.

    Returns:
        The exit code.

    Raises:
        UsageError: the repository holds several models, and no name is given.
        CommandError: an engine cannot start, or the front rejects it.
    """
    from quire_backend.settings import load_engine_config
    from quire_engine.errors import EngineError
    from quire_engine.replicas.remote.headless import run_headless
    from quire_engine.system.log_lines import log_to_stderr

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


def make_keys(path: Path, trusted: Sequence[str]) -> None:
    """Make a host's file of keys if there is none, add trusted public keys, and print its own public key on stdout.

    Raises:
        CommandError: the file is malformed, or cannot be written.
    """
    from quire_engine.ipc.keys import add_peers

    try:
        keys = add_peers(path, trusted)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None
    print(keys.public_key.hex())
    print(f"quire: {path} trusts {len(keys.peers)} hosts; above is this one's public key", file=sys.stderr)
