"""The dashboard beside a real server: it is in the ready line, sees the server, and ends with it."""

import contextlib
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect
from quire_cli.server.run_directory import sweep
from support.browser import chromium, pages_of
from support.clients import http
from support.serving import Server, run_cli, serve, wait_until
from support.sweeps import no_sweeps

pytestmark = pytest.mark.server

WITH_DASHBOARD = ("--dashboard", "--dashboard-port", "0")


def answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/_stcore/health", timeout=60) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The last test that uses it stops it."""
    with serve(*WITH_DASHBOARD) as running:
        yield running


@pytest.mark.browser
def test_it_goes_on_when_the_server_is_started_again_and_says_so_to_who_looks(server: Server) -> None:
    dashboard = server.dashboard
    with chromium() as browser, pages_of(browser, f"http://{dashboard}") as open_page:
        page = open_page()
        goodput = page.get_by_test_id("stMetric").filter(has=page.get_by_text("Goodput", exact=True))
        assert http(server, "/v2/models/tinypy/generate", {"text_input": "def f(", "max_tokens": 2})[0] == 200
        # The demo model has no SLO. Other tests may take the host's CPUs, which goes before the rest of the line.
        no_slo = (
            r"^No SLO is set(: nothing says what would be good enough\.|, and: other processes take the host's CPUs)"
        )
        expect(page.get_by_text(re.compile(no_slo))).to_be_visible()
        expect(page.get_by_text('"ttft_ms": 500').first, "the setting to copy").to_be_visible()
        expect(goodput).to_contain_text("no SLO")
        expect(page.get_by_text("within their SLO")).to_have_count(0)
        page.evaluate("window.notReloaded = true")
        os.kill(_tritonserver(server), signal.SIGKILL)
        server.wait_for_ready_line()
        assert server.dashboard == dashboard
        assert answers(dashboard)
        expect(page.get_by_text("The server was started again").first).to_be_visible()
        expect(page.get_by_text(re.compile(r"^Dashed lines, UTC: .*server restarted"))).to_be_visible()
        expect(page.get_by_text("The server does not answer.")).to_have_count(0)
        assert page.evaluate("window.notReloaded") is True


def test_the_ready_line_names_a_dashboard_that_answers(server: Server) -> None:
    assert server.dashboard.startswith("127.0.0.1:")
    assert answers(server.dashboard)
    # With a lower priority than the engine's, it would say nothing while the machine is saturated.
    for process in (_dashboard(server), _tritonserver(server)):
        assert set(_nice_values(process)) == {os.nice(0)}
    assert server.stop() == 0
    assert not answers(server.dashboard)


def test_it_dies_with_a_supervisor_that_is_killed(start: Callable[..., Server]) -> None:
    server = start(*WITH_DASHBOARD)
    assert answers(server.dashboard)
    with no_sweeps():
        server.stop(signal.SIGKILL)
        wait_until(lambda: not answers(server.dashboard), "the dashboard is gone")
        sweep()  # as the next start does, of what a killed run had to leave
    server.assert_nothing_left()


def test_alone_on_an_open_host_it_wants_a_token() -> None:
    done = run_cli("dashboard", "--host", "0.0.0.0", env={"QUIRE_DASHBOARD_TOKEN": ""})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--token" in done.stderr


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _tritonserver(server: Server) -> int:
    (found,) = [pid for pid in server.run_id.processes() if "bin/tritonserver" in _command(pid)]
    return found


def _dashboard(server: Server) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (found,) = [int(pid) for pid in children if "streamlit" in _command(int(pid))]
    return found


def _nice_values(pid: int) -> list[int]:
    """Of the process' threads, and of its session where the kernel has groups of them."""
    group = Path(f"/proc/{pid}/autogroup")
    of_group = [int(group.read_text().split()[-1])] if group.exists() else []
    of_threads = []
    for tid in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            of_threads.append(os.getpriority(os.PRIO_PROCESS, int(tid)))
    return of_threads + of_group
