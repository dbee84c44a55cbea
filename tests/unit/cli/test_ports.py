"""Ports are checked, and free ones found, before anything starts."""

import socket

import pytest
from quire_cli.errors import CommandError, UsageError
from quire_cli.ports import Endpoint, reserve, resolve

HOST = "127.0.0.1"


def test_zero_becomes_a_free_port_and_order_is_kept() -> None:
    found = reserve({"grpc-port": Endpoint(HOST, 0), "http-port": Endpoint(HOST, 0)})
    assert list(found) == ["grpc-port", "http-port"]
    ports = {endpoint.port for endpoint in found.values()}
    assert len(ports) == 2
    assert 0 not in ports
    assert reserve({"grpc-port": found["grpc-port"]}) == {"grpc-port": found["grpc-port"]}, "the port is free again"


def test_taken_port_is_named_with_its_option() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port} is in use.*--http-port"):
            reserve({"grpc-port": Endpoint(HOST, 0), "http-port": Endpoint(HOST, port)})


def test_one_port_for_two_services_is_refused() -> None:
    free = reserve({"grpc-port": Endpoint(HOST, 0)})["grpc-port"]
    with pytest.raises(UsageError, match=str(free.port)):
        reserve({"grpc-port": free, "http-port": free})


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(CommandError, match=f"--host {host}"):
        reserve({"grpc-port": Endpoint(host, 0)})


def test_clients_reach_a_server_on_all_addresses_over_loopback() -> None:
    assert Endpoint("0.0.0.0", 1).client_host == HOST
    assert Endpoint("192.0.2.1", 1).client_host == "192.0.2.1"


def test_a_host_is_an_address_of_ipv4() -> None:
    """Of a name, tritonserver makes 255.255.255.255."""
    assert resolve("localhost") == HOST
    for address in (HOST, "0.0.0.0", "192.0.2.1"):
        assert resolve(address) == address
    for host in ("::1", "[::1]"):
        with pytest.raises(CommandError, match=r"is an IPv6 address.*try 127\.0\.0\.1"):
            resolve(host)
    for host in ("no.such.host.invalid", "a..b", "x" * 300):
        with pytest.raises(CommandError, match=r"--host .* is no IPv4 address"):
            resolve(host)
