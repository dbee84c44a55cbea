"""Ports are checked, and free ones found, before anything starts."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from quire_cli.errors import CommandError, UsageError
from quire_cli.ports import Endpoint, ReservedPorts, resolve

HOST = "127.0.0.1"
ANY = Endpoint(HOST, 0)


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    with ReservedPorts() as taken:
        yield taken


def test_zero_becomes_a_free_port_and_order_is_kept(ports: ReservedPorts) -> None:
    found = ports.take({"grpc-port": ANY, "http-port": ANY})
    assert list(found) == ["grpc-port", "http-port"]
    numbers = {endpoint.port for endpoint in found.values()}
    assert len(numbers) == 2
    assert 0 not in numbers
    ports.close()
    with socket.socket() as other:
        other.bind((HOST, found["grpc-port"].port))  # it is free again


def test_a_port_is_kept_until_its_server_listens(ports: ReservedPorts) -> None:
    """Loading models takes tritonserver seconds, in which a connection of anybody's could have got its port."""
    port = ports.take({"http-port": ANY})["http-port"].port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))
    for _ in ("the server", "the server that is started again"):
        with socket.create_server((HOST, port)), socket.create_connection((HOST, port)):
            pass


BECOMES_A_SERVER = """
import os, socket, sys
from quire_cli.ports import Endpoint, ReservedPorts

ports = ReservedPorts(inheritable=sys.argv[1] == "inheritable")
port = ports.take({"port": Endpoint("127.0.0.1", 0)})["port"].port
other = "import socket, sys; socket.socket().bind(('127.0.0.1', int(sys.argv[1])))"
os.execv(sys.executable, [sys.executable, "-c", other, str(port)])
"""


@pytest.mark.parametrize("kind", ["inheritable", "not"])
def test_a_port_outlives_exec_where_that_is_asked(kind: str) -> None:
    result = subprocess.run([sys.executable, "-c", BECOMES_A_SERVER, kind], capture_output=True, text=True, check=False)
    assert ("Address already in use" in result.stderr) == (kind == "inheritable"), result.stderr


def test_taken_port_is_named_with_its_option(ports: ReservedPorts) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"port {port} is in use.*--http-port"):
            ports.take({"grpc-port": ANY, "http-port": Endpoint(HOST, port)})


def test_two_servers_that_start_together_do_not_keep_one_port(ports: ReservedPorts) -> None:
    """Neither listens yet."""
    first = ports.take({"openai-port": ANY})
    with ReservedPorts() as others:
        with pytest.raises(CommandError, match=f"port {first['openai-port'].port} is in use.*--openai-port"):
            others.take(first)
        ports.close()
        assert others.take(first) == first


@pytest.mark.parametrize("hosts", [(HOST, "0.0.0.0"), ("0.0.0.0", HOST)])
def test_nor_do_servers_of_one_and_of_all_addresses(ports: ReservedPorts, hosts: tuple[str, str]) -> None:
    port = ports.take({"grpc-port": Endpoint(hosts[0], 0)})["grpc-port"].port
    with ReservedPorts() as others, pytest.raises(CommandError, match=f"port {port} is in use"):
        others.take({"grpc-port": Endpoint(hosts[1], port)})


@pytest.mark.parametrize("host", [HOST, "0.0.0.0"])
def test_one_port_for_two_services_is_refused(ports: ReservedPorts, host: str) -> None:
    free = ports.take({"grpc-port": ANY})["grpc-port"]
    with pytest.raises(UsageError, match=f"--http-port and --grpc-port are both {free.port}"):
        ports.take({"http-port": Endpoint(host, free.port)})


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_host_that_is_not_ours(ports: ReservedPorts, host: str) -> None:
    with pytest.raises(CommandError, match=f"--host {host}"):
        ports.take({"grpc-port": Endpoint(host, 0)})


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
