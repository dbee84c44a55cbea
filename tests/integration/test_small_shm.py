"""Answers that find no room in /dev/shm, as in a container with Docker's default of 64 MB, or less."""

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from support.clients import ask_all, final_flags, http, metric, run
from support.serving import Server, wait_until

pytestmark = pytest.mark.server

SMALL_SHM = ("unshare", "--map-root-user", "--mount", "sh", "-c",
             'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh")  # fmt: skip
LARGE: dict[str, Any] = {"text_input": "x", "n": 22, "logprobs": 20, "max_tokens": 300, "ignore_eos": True,
                         "return_logprobs": True}  # fmt: skip
"""An answer of 10 MB."""


def test_an_answer_without_room_ends_with_an_error_and_the_next_request_works(start: Callable[..., Server]) -> None:
    if shutil.which("unshare") is None or subprocess.call([*SMALL_SHM, "true"], stderr=subprocess.DEVNULL):
        pytest.skip("no mount namespaces here")
    server = start(within=SMALL_SHM)
    first, stream, second = ask_all(server, [LARGE, {"text_input": "x", "max_tokens": 100, "stream": True}, LARGE])
    for answer in (first, second):
        assert "could not be sent; the server's log has the cause" in answer.message
    assert stream.error is None
    status, content = http(server, "/v2/models/tinypy/generate", LARGE)
    assert status == 400
    assert "could not be sent" in content["error"]
    smaller = {**LARGE, "n": 8}
    assert final_flags(server, **smaller) == [(False, True), (True, False)], "the flag follows alone"
    assert sum(len(json.loads(text)) for text in run(server, **smaller).responses[0]["logprobs"]) == 8 * 300
    wait_until(lambda: metric(server, "quire_requests_running") == 0, "nothing runs")
    assert server.stop() == 0, "at once, as nothing is open"
