"""Ports that a server will listen on, checked before anything is started, and kept for it."""

import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_cli.errors import CommandError, UsageError

_NAME = "quire-port-"
"""Beginning of the names of abstract sockets that hold endpoints."""


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

    def is_also(self, other: "Endpoint") -> bool:
        """Whether only one server can listen at both: 0.0.0.0 is every address of this machine."""
        return self.port == other.port and (self.host == other.host or "0.0.0.0" in (self.host, other.host))


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


class ReservedPorts:
    """Ports that servers will listen on, kept for them until `close`, or until the process ends.

    A tritonserver opens its ports seconds after they were chosen, once its models are loaded, and again at each
    restart. Meanwhile the system could give them to any connection. So each is held by a socket that is bound and does
    not listen: the system then chooses another port, and a server that names this one can only have it with
    SO_REUSEADDR, as tritonserver, uvicorn and Streamlit do. That holds for a second `quire serve` too, which must not
    keep the same port: an abstract Unix socket, whose name has one owner in this network namespace, keeps it off.

    Args:
        inheritable: they outlive `exec`, for a process that becomes the server itself.
    """

    def __init__(self, *, inheritable: bool = False) -> None:
        self._inheritable = inheritable
        self._sockets: list[socket.socket] = []
        self._endpoints: dict[str, Endpoint] = {}

    def __enter__(self) -> "ReservedPorts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep them no longer."""
        while self._sockets:
            self._sockets.pop().close()
        self._endpoints.clear()

    def take(self, wanted: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        """Check that every endpoint is free, replace each port 0 by a free one, and keep them all.

        If one cannot be had, those before it are kept all the same, until `close`.

        Args:
            wanted: option name without its dashes, such as `grpc-port` → endpoint.

        Raises:
            CommandError: a port is taken, or the host is not one of this machine.
            UsageError: two options name one port.
        """
        # Named ports go first, so that a free one never takes theirs.
        for option, endpoint in sorted(wanted.items(), key=lambda item: item[1].port == 0):
            for other, kept in self._endpoints.items():
                if endpoint.is_also(kept):
                    raise UsageError(
                        f"--{option} and --{other} are both {endpoint.port}; each needs a port of its own (0: any free)"
                    )
            bound = _bind(option, endpoint)
            self._sockets.append(bound)
            kept = Endpoint(endpoint.host, bound.getsockname()[1])
            self._sockets.append(_bind_name(option, kept))
            for held in self._sockets[-2:]:
                held.set_inheritable(self._inheritable)
            self._endpoints[option] = kept
        return {option: self._endpoints[option] for option in wanted}


def _bind(option: str, endpoint: Endpoint) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As servers do: connections of an earlier server in TIME_WAIT do not matter, a listener does.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((endpoint.host, endpoint.port))
        return bound
    except OSError as error:
        bound.close()
        raise _explain(option, endpoint, error) from None


def _bind_name(option: str, endpoint: Endpoint) -> socket.socket:
    """Hold the endpoint against others that reserve ports, here or at addresses that include this one."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.bind(f"\0{_NAME}{endpoint}")
        if any(other.is_also(endpoint) for other in _reserved() if other != endpoint):
            raise OSError(errno.EADDRINUSE, "another server has it")
        return bound
    except OSError as error:
        bound.close()
        raise _explain(option, endpoint, error) from None


def _reserved() -> Iterator[Endpoint]:
    """What processes of this machine have reserved."""
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        host, _, port = line.partition(f"@{_NAME}")[2].rpartition(":")
        if port.isdecimal():
            yield Endpoint(host, int(port))


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
