"""`quire serve --headless`: engines of this host for a model whose front is on another one. And `quire key`."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadlessOptions:
    """Options of `quire serve --headless`."""

    model_repository: Path | None
    name: str | None
    """Of the model; unset: the repository holds one."""
    data_parallel_start_rank: int | None
    data_parallel_size_local: int = 1
    data_parallel_address: str | None = None
    """This and the two below: unset: what model.json says."""
    data_parallel_rpc_port: int | None = None
    data_parallel_key_file: Path | None = None


def serve_headless(options: HeadlessOptions) -> int:
    """Serve until asked to stop.

    Returns:
        The exit code.

    Raises:
        UsageError: an option is missing or has a bad value.
        CommandError: an engine cannot start, or its front does not take it.
    """
    from quire_backend.settings import load_engine_config
    from quire_engine.errors import EngineError
    from quire_engine.replicas.remote.headless import run_headless
    from quire_engine.system.log_lines import log_to_stderr

    if options.data_parallel_start_rank is None:
        raise UsageError("--headless needs --data-parallel-start-rank: which replica the first engine here is")
    given = {
        "data_parallel_address": options.data_parallel_address,
        "data_parallel_rpc_port": options.data_parallel_rpc_port,
        "data_parallel_key_file": options.data_parallel_key_file and str(options.data_parallel_key_file),
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings["data_parallel_size_local"] = options.data_parallel_size_local
    try:
        config = load_engine_config(_version_folder(options)).for_headless(options.data_parallel_start_rank, **settings)
    except ValueError as error:
        raise CommandError(str(error)) from None
    log_to_stderr("quire: %(message)s")
    with Console() as console:
        try:
            asyncio.run(_until_asked(run_headless(config, lambda rank: console.announce(
                f"quire: ready data_parallel_rank={rank} front={config.parallel.data_parallel_address}:"
                f"{config.parallel.data_parallel_rpc_port}"
            ))))  # fmt: skip
        except (EngineError, ValueError, OSError) as error:
            raise CommandError(str(error)) from None
    return 0


async def _until_asked(serving: Any) -> None:
    """Await it, or end it on SIGTERM, SIGINT or SIGHUP."""
    task, loop = asyncio.ensure_future(serving), asyncio.get_running_loop()
    was_asked = False

    def stop() -> None:
        nonlocal was_asked
        was_asked = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not was_asked:
            raise


def _version_folder(options: HeadlessOptions) -> Path:
    """The folder of the model's newest version, which holds its model.json."""
    if options.model_repository is None:
        raise UsageError("--headless needs --model-repository, with the same model.json as the front has")
    models = sorted(path.parent.parent for path in options.model_repository.glob("*/*/model.json"))
    names = sorted({model.name for model in models})
    if not names:
        raise CommandError(f"{options.model_repository} holds no model; copy the front's")
    if options.name is None and len(names) > 1:
        raise UsageError(f"{options.model_repository} holds {', '.join(names)}; say which with --name")
    name = options.name or names[0]
    if name not in names:
        raise CommandError(f"{options.model_repository} holds no model {name}, but {', '.join(names)}")
    folder = options.model_repository / name
    versions = [path for path in folder.iterdir() if path.name.isdecimal() and (path / "model.json").is_file()]
    if not versions:
        raise CommandError(f"{folder} holds no version, a folder named by a number with a model.json; copy the front's")
    return max(versions, key=lambda path: int(path.name))


def key(path: Path, trusted: Sequence[str]) -> None:
    """Make a host's file of keys if there is none, have it trust others, and say its public key on stdout.

    Raises:
        CommandError: the file is not as it has to be, or cannot be written.
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
