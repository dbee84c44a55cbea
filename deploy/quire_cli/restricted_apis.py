"""Closes those of tritonserver's APIs that no client of a language model needs.

A client that may register shared memory can name the region of a model's process, and have an output written over data
that keeps that process alive; traces are written to files of the server's machine, and the log can be turned off.
tritonserver restricts an API to requests that carry a header, which it takes from its command line. Every user of the
machine can read that, so a secret would not help; ours is a header that no request can carry:

- over gRPC its name would hold capitals, which HTTP/2 forbids and gRPC refuses;
- over HTTP/1 its value would hold a line break, which ends a header.
"""

import secrets
from collections.abc import Iterator

from quire_cli.launch import ServerFlags

RESTRICTED_APIS = ("shared-memory", "trace", "logging")
"""In tritonserver's names."""
_FLAGS = ("http-restricted-api", "grpc-restricted-protocol")
_NAME = "NOBODY"


def restrictions(flags: ServerFlags) -> Iterator[tuple[str, str]]:
    """The flags that close these APIs, except those that the user's own flags give a header for."""
    value = f"{secrets.token_hex(8)}\n{secrets.token_hex(8)}"
    for flag in _FLAGS:
        closed = [api for api in RESTRICTED_APIS if api not in _given(flags, flag)]
        if closed:
            yield flag, f"{','.join(closed)}:{_NAME}={value}"


def opens_logging(flags: ServerFlags) -> bool:
    """Whether the user has given a header for the log's API, and so wants to see its effects."""
    return any("logging" in _given(flags, flag) for flag in _FLAGS)


def _given(flags: ServerFlags, flag: str) -> set[str]:
    """The APIs that the user's flags restrict."""
    return {api.strip() for value in flags.all_values(flag) for api in value.partition(":")[0].split(",")}
