"""The dashboard beside a server: what the ready line says of it."""

import socket
from contextlib import closing

from quire_cli.console import Console
from quire_cli.dashboard import Dashboard
from quire_cli.ports import Endpoint

SERVER = {"grpc": Endpoint("127.0.0.1", 8001), "metrics": Endpoint("127.0.0.1", 8002)}


def test_one_that_listens_is_named_however_long_the_server_took() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1])
        # It counts as started when this machine was: its time to start is over.
        assert Dashboard(endpoint, SERVER, Console()).ready_word() == f" dashboard={endpoint}"


def test_one_that_does_not_start_in_time_holds_nobody_up() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        assert Dashboard(endpoint, SERVER, Console()).ready_word() == ""
