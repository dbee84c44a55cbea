"""Which of tritonserver's APIs are closed, beside those that the user restricts with a header of his own."""

import pytest
from quire_cli.launch import RESTRICTED_APIS, ServerFlags, restrictions, shows_log


def closed(flags: ServerFlags) -> dict[str, str]:
    """By flag, the APIs; each is closed with a header that cannot be sent."""
    found = {}
    for flag, value in restrictions(flags):
        apis, _, header = value.partition(":")
        name, _, secret = header.partition("=")
        assert name.isupper()
        assert "\n" in secret.strip()
        found[flag] = apis
    return found


def test_without_flags_of_the_users_all_are_closed_each_time_with_another_value() -> None:
    flags = ServerFlags()
    every = ",".join(RESTRICTED_APIS)
    assert closed(flags) == {"http-restricted-api": every, "grpc-restricted-protocol": every}
    assert dict(restrictions(flags)) != dict(restrictions(flags))
    assert not shows_log(flags)


@pytest.mark.parametrize(
    ("tokens", "http", "is_log_open"),
    [
        (("--http-restricted-api=logging:key=value",), "shared-memory,trace", True),
        (("--http-restricted-api", "trace,shared-memory:key=a:b"), "logging", False),
        (("--http-restricted-api=trace:a=b", "--http-restricted-api=logging:c=d"), "shared-memory", True),
        (("--http-restricted-api=shared-memory,trace,logging:a=b",), None, True),
        (("--http-restricted-api=model-repository:logging=x",), "shared-memory,trace,logging", False),
    ],
)
def test_what_the_user_restricts_himself_is_left_to_him(
    tokens: tuple[str, ...], http: str | None, is_log_open: bool
) -> None:
    flags = ServerFlags(tokens)
    found = closed(flags)
    assert found.get("http-restricted-api") == http
    assert found["grpc-restricted-protocol"] == ",".join(RESTRICTED_APIS)
    assert shows_log(flags) is is_log_open
    merged = flags.merge(restrictions(flags))
    assert merged[-len(tokens) :] == list(tokens)
    assert sum(word.startswith("--http-restricted-api=") for word in merged[: -len(tokens)]) == (http is not None)
