"""`quire kv-store`: keeps KV blocks for engines of other hosts."""

import signal
import threading
from pathlib import Path

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError


def serve_kv_store(folder: Path, listen: str, key_file: Path, max_bytes: int) -> int:
    """Serve until asked to stop.

    Args:
        folder: where the blocks are kept.
        listen: `host:port`; port 0 is any that is free.
        key_file: of this host; trusts those that may come.
        max_bytes: of all that is kept.

    Returns:
        The exit code.

    Raises:
        UsageError: an option has a bad value.
        CommandError: it cannot listen, or the keys or the folder cannot be used.
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
    return 0
