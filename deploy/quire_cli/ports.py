"""Ports that a server will listen on, checked before anything is started."""

import errno
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from quire_cli.errors import CommandError, UsageError

__all__ = ["Endpoint", "is_loopback", "reserve", "resolve"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def client_host(self) -> str:
        """The host at which a client on this machine reaches it."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host


def is_loopback(host: str) -> bool:
    """Whether an IP address is this machine's alone. `quire_dashboard.settings` has the same rule."""
    return ipaddress.ip_address(host).is_loopback


def resolve(host: str) -> str:
    """The IPv4 address of a host. (tritonserver would use 255.255.255.255 for a name.)

    Raises:
        CommandError: it has none.
    """
    try:
        version = ipaddress.ip_address(host.strip("[]")).version
    except ValueError:
        version = None
    if version == 6:
        raise CommandError(
            f"--host {host} is an IPv6 address, and the server listens on IPv4; try 127.0.0.1 or 0.0.0.0"
        )
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _no_address(host) from None
    return str(found[0][4][0])


def reserve(wanted: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
    """Check that every endpoint is free, and replace each port 0 by a free one.

    Args:
        wanted: option name without its dashes, such as `grpc-port` → endpoint.

    Raises:
        CommandError: a port is taken, or the host is not one of this machine.
        UsageError: two options name one port.
    """
    found: dict[str, Endpoint] = {}
    sockets: list[socket.socket] = []
    try:
        # All stay bound until the last is, or the system could hand out one free port twice. Fixed ports go first,
        # so that a free one never takes theirs.
        for option, endpoint in sorted(wanted.items(), key=lambda item: item[1].port == 0):
            if endpoint in found.values():
                raise UsageError(f"--{option} {endpoint.port} is given twice; each needs a port of its own")
            sockets.append(_bind(option, endpoint))
            found[option] = Endpoint(endpoint.host, sockets[-1].getsockname()[1])
    finally:
        for bound in sockets:
            bound.close()
    return {option: found[option] for option in wanted}


def _bind(option: str, endpoint: Endpoint) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As servers do: connections of an earlier server in TIME_WAIT do not matter, a listener does.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((endpoint.host, endpoint.port))
        bound.listen(1)
        return bound
    except OSError as error:
        bound.close()
        raise _explain(option, endpoint, error) from None


def _explain(option: str, endpoint: Endpoint, error: OSError) -> CommandError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return _no_address(endpoint.host)
    if error.errno == errno.EADDRINUSE:
        return CommandError(f"port {endpoint.port} is in use; free it, or choose another with --{option} (0: any free)")
    if error.errno == errno.EACCES:
        return CommandError(f"port {endpoint.port} needs privileges; choose one above 1023 with --{option}")
    return CommandError(f"cannot listen on {endpoint}: {error.strerror}; choose another port with --{option}")


def _no_address(host: str) -> CommandError:
    return CommandError(f"--host {host} is no IPv4 address of this machine; try 127.0.0.1 or 0.0.0.0")
