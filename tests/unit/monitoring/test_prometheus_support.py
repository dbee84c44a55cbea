"""What starts Prometheus and Alertmanager for tests leaves nothing running, however the tests end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from quire_engine.system.process_state import is_alive, process_stat, started_at
from support.serving import wait_until

TESTS = Path(__file__).resolve().parents[2]
KILLED = """
import sys, tempfile
from pathlib import Path
from support import prometheus

says = 'echo "$$" >pid; echo \\'msg="Listening on" address=here\\'; exec sleep 600'
with prometheus._running(["sh", "-c", says], Path(sys.argv[1])) as address:
    print(address, flush=True)
    sys.stdin.read()
"""


def test_what_was_started_dies_with_the_tests(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == b"here\n"
        child = int((tmp_path / "pid").read_text())
        stat = process_stat(child)
        assert stat is not None
        tests.send_signal(signal.SIGKILL)
        tests.wait()
    wait_until(lambda: not is_alive(child, stat.start_time), "it is gone")


def test_when_a_process_was_started() -> None:
    before = time.time()
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            found = started_at(process.pid)
            assert found is not None
            assert before - 2 < found < time.time() + 2
            assert found == int(found)
        finally:
            process.kill()
    assert started_at(process.pid) is None
