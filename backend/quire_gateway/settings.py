"""Settings of the gateway."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from quire_gateway.keys import KeyRing
from quire_gateway.limits import RequestLimits

API_KEYS_VARIABLE = "QUIRE_OPENAI_API_KEYS"
"""Environment variable with the keys, one a line: every user can see a command line, but not an environment."""

_DOMAIN = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """What the gateway is in front of, and whom it lets in. The texts are of `quire openai --help`, some with a flag
    and what it takes.

    Raises:
        ValueError: a value is out of its range.
    """

    url: Annotated[str, ("HOST:PORT", "The server's gRPC.")] = "127.0.0.1:8001"
    port: Annotated[int, ("PORT", "From 0 to 65535; 0: any free one.")] = 9000
    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    """Lines of `keys.parse_key`. Any of them lets a client in; without any, no key is needed."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    ignored_fields: Annotated[
        tuple[str, ...], ("--ignore-field", "NAME", "A field of bodies to leave out; may be repeated.")
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        (
            "--cors-origin", "ORIGIN",
            "Browsers let pages of this origin, such as https://app.example, use it; * for any.",
        ),
    ] = ()  # fmt: skip
    allowed_media_domains: Annotated[
        tuple[str, ...],
        ("--allowed-media-domain", "HOST", "Fetch images from URLs of this host; may be repeated. Else of none."),
    ] = ()
    drain_timeout_s: Annotated[
        int, ("--drain-timeout", "S", "Seconds that running requests get when asked to stop.")
    ] = 30

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        if self.drain_timeout_s < 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}; it must be at least 0")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins holds {origin[:200]!r}; each must be SCHEME://HOST[:PORT], or *")
        for domain in self.allowed_media_domains:
            if not _DOMAIN.fullmatch(domain):
                raise ValueError(
                    f"allowed_media_domains holds {domain[:200]!r}; each must be a host in lower case, such as "
                    "images.example, without scheme and port"
                )
        if not all(line.strip() for line in self.api_keys):
            raise ValueError("api_keys holds an empty one")
        KeyRing(self.api_keys)
