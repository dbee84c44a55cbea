"""`quire kv-store`: keeps KV blocks for engines of other hosts."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError


def serve_kv_store(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the blocks are kept. Is made when missing.")],
    listen: Annotated[str, ("HOST:PORT", "An address or a name of this host.")],
    key_file: Annotated[
        Path,
        ("FILE", "This host's keys, which trust those of the engines' hosts: quire keys host."),
    ],
    max_bytes: Annotated[int, "Of all blocks; those not used for longest make room."] = 16 << 30,
) -> None:
    """Keep KV blocks for engines of other hosts, which have kv_transfer_config with RemoteStorageConnector.

    Engines go on without it while it is away. Example: quire kv-store /var/cache/quire-kv --listen 10.0.0.5:29600
    --key-file /etc/quire/keys.json
    """
    from quire_engine.ipc.keys import read_keys
    from quire_engine.kv_connector.store_server import StoreServer
    from quire_engine.system.log_lines import log_to_stderr

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise UsageError(f"--listen is {listen!r}; it must be HOST:PORT, the host an address or a name of this one")
    if max_bytes < 1:
        raise UsageError(f"--max-bytes is {max_bytes}; it must be at least 1")
    try:
        keys = read_keys(key_file, "--key-file")
        if not keys.peers:
            raise CommandError(f"--key-file {key_file} trusts nobody, so no engine can come; add the public key of "
                               f"its host with: quire keys host {key_file} --trust KEY")  # fmt: skip
        server = StoreServer(folder, max_bytes, keys, host.strip("[]"), int(port), key_file)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{folder} cannot be used: {error.strerror}") from None
    log_to_stderr("quire: %(message)s")
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.set())
    with Console() as console:
        console.announce(f"quire: ready kv_store={server.endpoint}")
        while not asked.wait(0.5):
            pass  # a signal that comes just before the wait begins does not end it
        server.close()
