"""A reading of /metrics that fails: why, in one line that no server controls."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from quire_load.scrape import ScrapeError, fetch, parse

CONTROL = "\x1b[2J\x9b\rx"


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503, f"Busy{CONTROL}")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_a_reason_phrase_and_a_malformed_line_are_printable(server: str) -> None:
    with pytest.raises(ScrapeError, match="answers 503 Busy") as refused:
        fetch(server)
    with pytest.raises(ScrapeError, match="not in Prometheus") as malformed:
        parse(f"quire_x{CONTROL} {CONTROL}", 0.0)
    assert str(refused.value).isprintable()
    assert str(malformed.value).isprintable()
