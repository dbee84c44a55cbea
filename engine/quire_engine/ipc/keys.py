"""Keys of hosts that work together: a file on each host, with its secret key and the public keys that it trusts.

::

    {"public_key": "…", "secret_key": "…", "peers": ["public key of another host", …]}

Keys are those of CurveZMQ (Curve25519), 64 hexadecimal digits each.
"""

import json
import logging
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

logger = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_FILE_BYTES = 1 << 20
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKeys:
    """The content of a file of keys."""

    public_key: bytes
    secret_key: bytes = field(repr=False)
    peers: tuple[bytes, ...] = ()
    """Public keys of the other hosts."""


def make_keys() -> HostKeys:
    """New keys, without peers."""
    public_key, secret_key = zmq.curve_keypair()
    return HostKeys(public_key=z85.decode(public_key), secret_key=z85.decode(secret_key))


def add_peers(path: Path, peers: Sequence[str]) -> HostKeys:
    """Add peers to a host's file of keys. If there is none, it is made, and only its owner may read it.

    Raises:
        ValueError: a key is malformed, or so is the file (`read_keys`).
        OSError: the file cannot be written.
    """
    new = [_key(peer, "the public key") for peer in peers]
    keys = read_keys(path, "the file of keys") if path.exists() else make_keys()
    known = tuple(dict.fromkeys((*keys.peers, *new)))
    keys = HostKeys(public_key=keys.public_key, secret_key=keys.secret_key, peers=known)
    content = {
        "public_key": keys.public_key.hex(), "secret_key": keys.secret_key.hex(), "peers": [one.hex() for one in known]
    }  # fmt: skip
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # never half of it, and never readable by others
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return keys


def read_keys(path: Path, setting: str = "data_parallel_key_file") -> HostKeys:
    """The keys in a file, which must belong to the present user and be readable by no other.

    Args:
        path: of the file.
        setting: the name of the setting, for messages.

    Raises:
        ValueError: there is no such file, others may read it, or it does not hold keys.
    """
    name = f"{setting} {path}"
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name} is no regular file; make one with: quire keys host {path}")
            if status.st_uid != os.geteuid():
                raise ValueError(f"{name} belongs to user {status.st_uid}, not to the one that reads it "
                                 f"({os.geteuid()}); chown it")  # fmt: skip
            if status.st_mode & 0o077:
                raise ValueError(f"{name} can be read by others (mode {stat.S_IMODE(status.st_mode):03o}); "
                                 f"chmod 600 it, and make new keys if somebody may have read it")  # fmt: skip
            content = json.loads(file.read(MAX_FILE_BYTES))
    except FileNotFoundError:
        raise ValueError(f"{name} is not there; make it with: quire keys host {path}") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):  # the content is in no message
        raise ValueError(f"{name} is not JSON; make it with: quire keys host {path}") from None
    fields = content if isinstance(content, dict) else {}
    if fields.keys() != {"public_key", "secret_key", "peers"} or not isinstance(fields["peers"], list):
        raise ValueError(
            f"{name} must hold public_key, secret_key and a list of peers; make it with: quire keys host {path}"
        )
    public_key, secret_key = (_key(fields[key], f"{key} in {path}") for key in ("public_key", "secret_key"))
    if z85.decode(zmq.curve_public(z85.encode(secret_key))) != public_key:
        raise ValueError(
            f"{name}: its public_key does not belong to its secret_key; make it with: quire keys host {path}"
        )
    peers = tuple(_key(peer, f"one of the peers in {path}") for peer in fields["peers"])
    return HostKeys(public_key=public_key, secret_key=secret_key, peers=peers)


class TrustedPeers:
    """The present peers in a file of keys, to which hosts may be added while it is used.

    Args:
        path: of the file.
        keys: what was read from it.
        setting: the name of the setting, for messages.
    """

    def __init__(self, path: Path, keys: HostKeys, setting: str = "data_parallel_key_file") -> None:
        self._path, self._setting = path, setting
        self._keys = keys
        self._seen = self._look()

    @property
    def now(self) -> tuple[bytes, ...]:
        """The public keys. They stay the same while the file cannot be read."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                keys = read_keys(self._path, self._setting)
                if keys.public_key != self._keys.public_key:
                    raise ValueError(f"{self._setting} {self._path} has another public key than when it was read first")
                self._keys = keys
            except ValueError as error:
                logger.warning("whom this host trusts stays as it was: %s", error)
        return self._keys.peers

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        # The last one changes with the file's mode and owner, too, for which a file may have been rejected.
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns


def _key(value: object, what: str) -> bytes:
    """The value is in no message: it may be secret."""
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise ValueError(f"{what} is no key; keys are {2 * KEY_BYTES} digits from 0 to f, as by `quire keys host`")
    return bytes.fromhex(value)
