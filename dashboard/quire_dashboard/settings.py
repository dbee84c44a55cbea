"""Settings of the dashboard. They come by environment, as every user can see a token on a command line."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DASHBOARD_TOKEN_VARIABLE", "INTROSPECTION_TOKEN_VARIABLE", "Settings", "is_loopback"]

DASHBOARD_TOKEN_VARIABLE = "QUIRE_DASHBOARD_TOKEN"
INTROSPECTION_TOKEN_VARIABLE = "QUIRE_INTROSPECTION_TOKEN"
MIN_TOKEN_CHARACTERS = 16
TRACE_ID = "{trace_id}"
_PREFIX = "QUIRE_DASHBOARD_"
TRACES_VARIABLE = f"{_PREFIX}TRACES"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host. Of names, only `localhost` is known to be one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The endpoints, and their tokens."""

    url: str = "127.0.0.1:8001"
    """HOST:PORT of tritonserver's gRPC."""
    metrics: str = "127.0.0.1:8002"
    """HOST:PORT of tritonserver's /metrics."""
    health: str = ""
    """HOST:PORT of the health address of the `quire serve` that has started the server; empty: unknown."""
    prometheus: str = ""
    """Base URL of a Prometheus that scrapes the server; empty: the dashboard keeps its own history."""
    traces: str = ""
    """Address of a trace in the viewer of traces, with `{trace_id}` in it; empty: there is none."""
    token: str = ""
    """The token that visitors need; empty: none."""
    introspection_token: str = ""
    """The model's token for seeing and cancelling requests."""

    def __post_init__(self) -> None:
        for name in ("url", "metrics", *(["health"] if self.health else [])):
            value = getattr(self, name)
            host, _, port = value.rpartition(":")
            if not host or not port.isdecimal() or "/" in value:
                raise ValueError(f"{name} is {value!r}; it must be HOST:PORT, such as {Settings.default(name)}")
        if self.token and len(self.token) < MIN_TOKEN_CHARACTERS:
            raise ValueError(
                f"{DASHBOARD_TOKEN_VARIABLE} has {len(self.token)} characters; it must have at least "
                f"{MIN_TOKEN_CHARACTERS}, such as openssl rand -hex 16 makes"
            )
        if self.prometheus and not self.prometheus.startswith(("http://", "https://")):
            raise ValueError(f"prometheus is {self.prometheus!r}; it must be a URL, such as http://127.0.0.1:9090")
        if self.traces and not (self.traces.startswith(("http://", "https://")) and TRACE_ID in self.traces):
            raise ValueError(
                f"traces is {self.traces!r}; it must be a URL with {TRACE_ID}, such as "
                f"http://127.0.0.1:16686/trace/{TRACE_ID}"
            )

    @staticmethod
    def default(name: str) -> str:
        """The default of the field `name`."""
        return {"url": "127.0.0.1:8001", "metrics": "127.0.0.1:8002", "health": "127.0.0.1:8003"}[name]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Read what `to_environment` wrote."""
        given = {
            "url": environment.get(f"{_PREFIX}URL"),
            "metrics": environment.get(f"{_PREFIX}METRICS"),
            "health": environment.get(f"{_PREFIX}HEALTH"),
            "prometheus": environment.get(f"{_PREFIX}PROMETHEUS"),
            "traces": environment.get(TRACES_VARIABLE),
            "token": environment.get(DASHBOARD_TOKEN_VARIABLE),
            "introspection_token": environment.get(INTROSPECTION_TOKEN_VARIABLE),
        }
        return cls(**{name: value for name, value in given.items() if value})

    def to_environment(self) -> dict[str, str]:
        """The variables that carry these settings to the dashboard's own process."""
        return {
            f"{_PREFIX}URL": self.url,
            f"{_PREFIX}METRICS": self.metrics,
            f"{_PREFIX}HEALTH": self.health,
            f"{_PREFIX}PROMETHEUS": self.prometheus,
            TRACES_VARIABLE: self.traces,
            DASHBOARD_TOKEN_VARIABLE: self.token,
            INTROSPECTION_TOKEN_VARIABLE: self.introspection_token,
        }
