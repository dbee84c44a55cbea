"""Settings of the dashboard. They come by environment, as every user can see a token on a command line."""

import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

DASHBOARD_TOKEN_VARIABLE = "QUIRE_DASHBOARD_TOKEN"
INTROSPECTION_TOKEN_VARIABLE = "QUIRE_INTROSPECTION_TOKEN"
INTROSPECTION_TOKENS_VARIABLE = "QUIRE_INTROSPECTION_TOKENS"
"""Where servers have different ones: a JSON object, from a server's gRPC address to its token."""
HTTP_PORT, METRICS_PORT = 8000, 8002
"""Triton's usual ones."""
MIN_TOKEN_CHARACTERS = 16
TRACE_ID = "{trace_id}"
TRACES_VARIABLE = "QUIRE_DASHBOARD_TRACES"
SERVERS_VARIABLE = "QUIRE_DASHBOARD_SERVERS"
"""The settings of all servers as JSON, for the process that Streamlit runs."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host. Of names, only `localhost` is known to be one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One server's endpoints, and their tokens. Of several servers, each has its own."""

    url: str = "127.0.0.1:8001"
    """HOST:PORT of tritonserver's gRPC; what a server is named by."""
    metrics: str = "127.0.0.1:8002"
    """HOST:PORT of tritonserver's /metrics."""
    http: str = "127.0.0.1:8000"
    """HOST:PORT of tritonserver's HTTP, for commands that send a request."""
    instance: str = ""
    """What the Prometheus knows it by, among several, in the label of that name; empty: it is the only one there."""
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
        for name in ("url", "metrics", "http", *(["health"] if self.health else [])):
            value = getattr(self, name)
            host, _, port = value.rpartition(":")
            if not host or not port.isdecimal() or any(one in value for one in "/,"):
                raise ValueError(f"{name} is {value!r}; it must be HOST:PORT, such as {Settings.default(name)}")
        if self.token and len(self.token) < MIN_TOKEN_CHARACTERS:
            raise ValueError(
                f"{DASHBOARD_TOKEN_VARIABLE} (or --token) has {len(self.token)} characters; it must have at least "
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
        ports = {"url": 8001, "metrics": METRICS_PORT, "http": HTTP_PORT, "health": 8003}
        return f"127.0.0.1:{ports[name]}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Those of the first server in what `to_environment` made."""
        return cls.all_from_environment(environment)[0]

    @staticmethod
    def all_from_environment(environment: Mapping[str, str] = os.environ) -> "tuple[Settings, ...]":
        """Those of all servers in it; without any, the usual ones of this machine."""
        return _read(environment.get(SERVERS_VARIABLE, "[{}]"))


@lru_cache(maxsize=16)
def _read(text: str) -> tuple[Settings, ...]:
    """Every refresh of every visitor asks."""
    return msgspec.json.decode(text, type=tuple[Settings, ...])


def to_environment(servers: Sequence[Settings]) -> dict[str, str]:
    """The variable that carries the settings of all servers to the process that Streamlit runs."""
    return {SERVERS_VARIABLE: msgspec.json.encode(servers).decode()}


def settings_of_servers(
    urls: Sequence[str], metrics: Sequence[str], http: Sequence[str] = (), *, introspection_token: str = "",
    introspection_tokens: str = "", **shared: str,
) -> tuple[Settings, ...]:  # fmt: skip
    """One server's settings after the other's.

    Args:
        urls: of each server; none: the one of this machine.
        metrics: of each server, in the same order; none: on Triton's usual port of the same host.
        http: likewise.
        introspection_token: of all servers that `introspection_tokens` does not name.
        introspection_tokens: JSON, from a server's URL to its token; empty: there is one for all.
        shared: the other fields, which are the same for all.

    Raises:
        ValueError: what is wrong, and what it must be.
    """
    urls = urls or [Settings.default("url")]
    hosts = [url.rpartition(":")[0] for url in urls]
    metrics = metrics or [f"{host}:{METRICS_PORT}" for host in hosts]
    http = http or [f"{host}:{HTTP_PORT}" for host in hosts]
    for name, values in (("metrics", metrics), ("http", http)):
        if len(values) != len(urls):
            raise ValueError(f"{name} is given {len(values)} times and url {len(urls)}; each url has its own, in order")
    for name, values in (("url", urls), ("metrics", metrics)):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"{name} is {twice!r} for more than one server; give each its own")
    tokens = _tokens(introspection_tokens, urls)
    return tuple(
        Settings(
            url=url, metrics=its, http=address, instance=its if len(urls) > 1 else "",
            introspection_token=tokens.get(url, introspection_token), **shared,
        )
        for url, its, address in zip(urls, metrics, http, strict=True)
    )  # fmt: skip


def _tokens(text: str, urls: Sequence[str]) -> dict[str, str]:
    """The text is never repeated: it is full of secrets."""
    try:
        found: Any = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(token, str) for token in found.values()):
        raise ValueError(f"{INTROSPECTION_TOKENS_VARIABLE} must be a JSON object of tokens by url")
    unknown = sorted(found.keys() - set(urls))
    if unknown:
        raise ValueError(f"{INTROSPECTION_TOKENS_VARIABLE} names {unknown[0]!r}; the servers are {', '.join(urls)}")
    return found
