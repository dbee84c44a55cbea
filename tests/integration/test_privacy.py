"""What another user of the machine can see of a server and its clients: nothing that is theirs.

The stranger is a real process under another user id, which root alone can start. It looks as long as the server runs:
a region that is open only for a moment is read by whoever waits for it.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import MODEL, http, run
from support.processes import ended, start_python
from support.serving import Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user"),
]

NOBODY = 65534
TOKEN = "a token that only operators know"
PROMPT = "def a_secret_of_the_client("
# Everything is imported before it changes its user: the interpreter's folder may be closed to that one.
STRANGER = f"""
    import json, os, socket, stat, sys, threading, time

    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
    seen, opened = set(), []

    def watch():
        while True:
            for name in os.listdir("/dev/shm"):
                if name not in seen:
                    try:
                        descriptor = os.open("/dev/shm/" + name, os.O_RDONLY)
                        opened.append(name)
                        os.close(descriptor)
                    except OSError:
                        pass
                    seen.add(name)
            time.sleep(0.002)

    def can_have(path):
        mode = os.lstat(path).st_mode
        if stat.S_ISSOCK(mode):
            socket.socket(socket.AF_UNIX).connect(path)
        elif stat.S_ISDIR(mode):
            os.listdir(path)
        elif stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY))
        else:
            return False
        return True

    def look(paths):
        found = []
        for path in paths:
            try:
                if can_have(path):
                    found.append(path)
            except OSError:
                pass
        return found

    threading.Thread(target=watch, daemon=True).start()
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps({{"seen": sorted(seen), "opened": opened, "found": look(json.loads(line))}}), flush=True)
"""


class Stranger:
    """Another user."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        assert process.stdout is not None
        process.stdout.readline()  # it watches

    def look(self, paths: set[Path]) -> dict[str, list[str]]:
        """What it has `seen` and `opened` in /dev/shm since it began, and which of the paths it `found` open now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(sorted(map(str, paths))).encode() + b"\n")
        self._process.stdin.flush()
        said: dict[str, list[str]] = json.loads(self._process.stdout.readline())
        return said


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    process = start_python(STRANGER)
    with ended([process]):
        yield Stranger(process)


class Asking(threading.Thread):
    """A client whose requests follow one another until it is stopped, through errors too."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._stopping = threading.Event()
        self.first_token = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            answer = run(self._server, text_input=PROMPT, stream=True, max_tokens=100, ignore_eos=True,
                         on_response=lambda response: self.first_token.set())  # fmt: skip
            if answer.error is not None:  # the model is away
                self._stopping.wait(0.5)

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)


def below(folder: Path) -> set[Path]:
    """A folder and all in it."""
    return {folder, *folder.rglob("*")}


def of_process(pid: int) -> set[Path]:
    """Where /proc shows what a process has in its memory, its environment and its files."""
    process = Path(f"/proc/{pid}")
    return {process / name for name in ("environ", "mem", "maps", "fd", "cwd", "root", "map_files")} | {
        process / "fd" / name for name in os.listdir(process / "fd")
    }


def all_of(server: Server) -> set[Path]:
    """Every place where something of the server is, by its run id and by what its processes have."""
    pids = [server.process.pid, *server.run_id.processes()]
    temporary = Path(tempfile.gettempdir()).iterdir()
    found = set(server.run_id.shared_memory()).union(*map(below, [*server.run_id.directories(), *temporary]))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, _, kind, _, _, *path = line.split()
        # No process reads what is sent to the addresses that stand for an engine's number and for a reserved port.
        if path and not (kind == "0002" and path[0].startswith(("@quire-engine-", "@quire-port-"))):
            assert not path[0].startswith("@"), f"anybody can connect to an abstract socket: {path[0]}"
    return found.union(*map(of_process, pids))


@pytest.fixture
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The temporary folder of the server, open to all as the system's is: what is in it is the server's."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setenv("TMPDIR", folder)  # for the server
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.mark.usefixtures("own_temporary_folder")
def test_nothing_is_open_to_another_user(stranger: Stranger) -> None:
    environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
    flags = ("--", "--model-control-mode=explicit", f"--load-model={MODEL}")
    with serve(*flags, env=environment, step_seconds=0.02) as server:
        client = Asking(server)
        client.start()
        try:
            assert client.first_token.wait(60)
            assert_closed(server, stranger, num_regions=1)
            # A model that is loaded later, and a server that is started again.
            assert http(server, f"/v2/repository/models/{MODEL}/unload", {})[0] == 200
            assert http(server, f"/v2/repository/models/{MODEL}/load", {})[0] == 200
            assert_closed(server, stranger, num_regions=2)
            (tritonserver,) = (pid for pid in server.run_id.processes() if is_tritonserver(pid))
            os.kill(tritonserver, signal.SIGKILL)
            server.wait_for_ready_line()
            assert run(server, text_input=PROMPT, max_tokens=3).text
            assert_closed(server, stranger, num_regions=3)
        finally:
            client.stop()


def is_tritonserver(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver"


def assert_closed(server: Server, stranger: Stranger, *, num_regions: int) -> None:
    """The stranger has seen so many regions at least, and opened nothing."""
    seen = stranger.look(all_of(server))
    assert len([name for name in seen["seen"] if name.startswith(server.run_id.shared_memory_prefix)]) >= num_regions
    assert seen["opened"] == []
    assert seen["found"] == []
    for pid in server.run_id.processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert TOKEN not in command
        assert PROMPT not in command
