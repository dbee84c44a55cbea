"""TCP sockets that accept only connections with known keys.

Both sides prove that they have their secret keys (CurveZMQ), and all messages are encrypted. A connection without proof
gets no further than libzmq's I/O thread, and is closed after `HANDSHAKE_MS`. libzmq asks at an inproc address whether a
public key is known (ZAP, RFC 27; `Asked`); until there is an answer, the connection waits.
"""

import errno
import socket
from collections.abc import Collection, Sequence
from typing import Any

import zmq

from quire_engine.ipc.keys import HostKeys

HANDSHAKE_MS = 5000
_DOMAIN = b"quire"
_ALLOWED, _DENIED = (b"200", b"OK"), (b"400", b"unknown key")


def serve_securely(listening: "zmq.Socket[Any]", keys: HostKeys) -> None:
    """Have a socket accept only known keys. To be called before it is bound."""
    for option, value in (
        (zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, keys.secret_key), (zmq.ZAP_DOMAIN, _DOMAIN),
        (zmq.ZAP_ENFORCE_DOMAIN, 1), (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    ):  # fmt: skip
        listening.setsockopt(option, value)


def connect_securely(connecting: "zmq.Socket[Any]", keys: HostKeys) -> None:
    """Have a socket use these keys, and accept only the first peer as the server. To be called before it connects."""
    for option, value in (
        (zmq.CURVE_SERVERKEY, keys.peers[0]), (zmq.CURVE_PUBLICKEY, keys.public_key),
        (zmq.CURVE_SECRETKEY, keys.secret_key), (zmq.IPV6, 1),
    ):  # fmt: skip
        connecting.setsockopt(option, value)


def bind(listening: "zmq.Socket[Any]", host: str, port: int) -> str:
    """Listen at an address or name of this host. Returns the endpoint: port 0 is any free one.

    Raises:
        ValueError: it cannot listen there; the message says why, and what to do.
    """
    try:
        # `bind` of ZMQ takes addresses and devices, no names.
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        listening.setsockopt(zmq.IPV6, ":" in address)
        listening.bind(tcp_address(address, port))
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"{host!r} is no address and no name of a host") from None
    except zmq.ZMQError as error:
        mend = "another program listens there; end it, or give another port"
        if error.errno == zmq.EADDRNOTAVAIL:
            mend = "this host has no such address; give one of its own (see: ip address)"
        elif error.errno == errno.EACCES:
            mend = "only root may listen there; give a port from 1024 on"
        raise ValueError(f"cannot listen at {host}, port {port}: {zmq.strerror(error.errno or 0)}; {mend}") from None
    return str(listening.getsockopt_string(zmq.LAST_ENDPOINT))


def listen_for_questions(context: "zmq.Context[Any]") -> "zmq.Socket[Any]":
    """The socket for libzmq's questions (`Asked`); one per context."""
    asked: zmq.Socket[Any] = context.socket(zmq.REP)
    asked.bind("inproc://zeromq.zap.01")
    return asked


class Asked:
    """libzmq's question whether a connection is accepted. The other side has proved that it has the secret key.

    Args:
        frames: of the message.
        known: public keys.
    """

    def __init__(self, frames: Sequence[bytes], known: Collection[bytes]) -> None:
        self._version, self._request_id, _, address, _, mechanism, *credentials = frames
        self.address = address.decode(errors="replace")
        self.key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        self.is_known = self.key in known

    @property
    def answer(self) -> list[bytes]:
        """The frames of the answer; the user's name is the key."""
        verdict = _ALLOWED if self.is_known else _DENIED
        return [self._version, self._request_id, *verdict, self.key.hex().encode(), b""]


def tcp_address(host: str, port: int) -> str:
    """The address in ZMQ's form."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
