"""Settings of the gateway."""

import hmac
from dataclasses import dataclass

__all__ = ["API_KEYS_VARIABLE", "GatewaySettings"]

API_KEYS_VARIABLE = "QUIRE_OPENAI_API_KEYS"
"""Environment variable with the keys, one a line: every user can see a command line, but not an environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """What the gateway is in front of, and whom it lets in.

    Raises:
        ValueError: a value is out of its range.
    """

    url: str = "127.0.0.1:8001"
    """`host:port` of tritonserver's gRPC."""
    host: str = "127.0.0.1"
    port: int = 9000
    api_keys: tuple[str, ...] = ()
    """Any of them lets a client in; none: everybody is let in."""
    max_body_bytes: int = 16 << 20
    """Largest body of a request."""
    drain_timeout_s: int = 30
    """How long open requests get when it is asked to end."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes is {self.max_body_bytes}; it must be at least 1")
        if self.drain_timeout_s < 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}; it must be at least 0")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ValueError("api_keys holds one that no header can carry; they must be printable ASCII, and not empty")

    def lets_in(self, authorization: str) -> bool:
        """Whether a header of this value shows a key. Takes as long whichever key it is, and however much is right."""
        if not self.api_keys:
            return True
        scheme, _, shown = authorization.partition(" ")
        matches = [hmac.compare_digest(shown.strip().encode(), key.encode()) for key in self.api_keys]
        return scheme.lower() == "bearer" and any(matches)
