"""API keys: whom the gateway lets in, and how much each may ask for.

A line names one key: the key itself, or, so that a file holds nothing to show, its name and hash, with limits if it has
any; `quire api-key NAME` makes both::

    sk-quire-1FaQ…
    batch sha256:9f86d081884c7d65… requests_per_minute=60 tokens_per_minute=20000 max_concurrent=4
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

_SCHEME = "sha256:"
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """One key, which cannot be found out from this."""

    name: str
    sha256: str
    """Of the key, in hexadecimal. Keys are random and long: a slow hash would protect them no better."""
    requests_per_minute: int | None = None
    """Unset: any number."""
    tokens_per_minute: int | None = None
    """Of prompts and answers together; unset: any number."""
    max_concurrent: int | None = None
    """Requests at a time; unset: any number."""

    def line(self) -> str:
        """As it stands in a file."""
        limits = [f"{name}={getattr(self, name)}" for name in _LIMITS if getattr(self, name) is not None]
        return " ".join([self.name, _SCHEME + self.sha256, *limits])


def parse_key(line: str) -> ApiKey:
    """What a line says.

    Raises:
        ValueError: it is neither a key nor a name with a hash. The message does not repeat it.
    """
    if not line.strip():
        raise ValueError("an API key is empty")
    first, *rest = line.split()
    if not rest:
        if not (first.isascii() and first.isprintable()):
            raise ValueError("an API key holds what no header can carry; it must be printable ASCII")
        digest = hashlib.sha256(first.encode()).hexdigest()
        return ApiKey(name=f"sha256-{digest[:8]}", sha256=digest)
    if not _NAME.fullmatch(first) or not re.fullmatch(rf"{_SCHEME}[0-9a-f]{{64}}", rest[0]):
        raise ValueError(
            "an API key holds a space; it must be without, or the line be NAME sha256:HASH and limits, as "
            "quire api-key makes it"
        )
    limits = {}
    for item in rest[1:]:
        name, _, value = item.partition("=")
        if name not in _LIMITS or name in limits or not re.fullmatch("[1-9][0-9]{0,17}", value):
            raise ValueError(
                f"the API key {first} has the limit {item[:80]!r}; it must be one of {', '.join(_LIMITS)}, once each, "
                "with =NUMBER above 0"
            )
        limits[name] = int(value)
    return ApiKey(name=first, sha256=rest[0].removeprefix(_SCHEME), **limits)


def make_key(name: str, **limits: int | None) -> tuple[str, ApiKey]:
    """A new key, and what may be kept of it.

    Args:
        name: that /metrics shows.
        limits: see `ApiKey`.

    Raises:
        ValueError: the name has other characters than letters, digits, `_`, `-` and `.`, or a limit is not above 0.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name is {name[:80]!r}; it must be 1 to 64 of a-z, A-Z, 0-9, _, -, .")
    key = f"sk-quire-{secrets.token_urlsafe(32)}"
    made = ApiKey(name=name, sha256=hashlib.sha256(key.encode()).hexdigest(), **limits)
    return key, parse_key(made.line())


class KeyRing:
    """All keys.

    Args:
        lines: see `parse_key`.

    Raises:
        ValueError: one is wrong, or two have one name or are one key.
    """

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self.keys = [parse_key(line) for line in lines]
        for what, values in (("name", [key.name for key in self.keys]), ("hash", [key.sha256 for key in self.keys])):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"two API keys have the {what} {twice[:16]}; each must have its own")

    def find(self, authorization: str) -> ApiKey | None:
        """The key that a header of this value shows. Takes as long whichever it is, and however much is right."""
        scheme, _, shown = authorization.partition(" ")
        digest = hashlib.sha256(shown.strip().encode()).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return found if scheme.lower() == "bearer" else None
