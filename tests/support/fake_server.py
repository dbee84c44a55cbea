"""A stand-in for tritonserver, to test what watches over one: ports, a stub and a log, but no models and no GPU.

It runs as a program: `python fake_server.py FOLDER SERVICE=PORT... --FLAG=VALUE...`, and takes tritonserver's own
`--SERVICE-port=PORT` as well. A test steers it with files in FOLDER:

    plan.json       "log": lines to print; "exit_code": what to end with at once; "no_stub": true; "stub_argument": what
                    the stub, a copy of `sleep`, gets; "delayed": services whose port opens once there is a file `open`
                    "models": its models, name -> state and reason, which makes it have a repository index; it is read
                    anew for each answer; "unready": true, for /v2/health/ready; "in_flight": the stub has a
                    status page with so many requests, which beats while there is no file `hang`; "is_ending": the
                    model is being unloaded; "outage": why its engine is down; "ends": false, it does not end at SIGTERM
    starts          it writes one line for each of its starts: the id of its process
    flags           and one with the flags that it was given
"""

import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from quire_backend.status_page import BEAT_SECONDS, StatusPage, StubState
from quire_engine.system import process_state

_PORT = re.compile(r"(?:--)?(grpc|http|metrics)(?:-port)?=(\d+)")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True


class _Answer(socketserver.StreamRequestHandler):
    folder: Path

    def handle(self) -> None:
        line = self.rfile.readline()
        plan = json.loads((self.folder / "plan.json").read_text())
        if line.startswith(b"GET /v2/health/ready ") and plan.get("unready"):
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        elif line.startswith(b"GET"):
            self.wfile.write(ANSWER % (0, b""))
        elif line.startswith(b"POST /v2/repository/index ") and "models" in plan:
            index = json.dumps([_indexed(name, *says.split(" ", 1)) for name, says in plan["models"].items()]).encode()
            self.wfile.write(ANSWER % (len(index), index))


def _indexed(name: str, state: str, reason: str = "") -> dict[str, str]:
    return {"name": name, "version": "1", "state": state, "reason": reason}


def _listen(port: int, opens: Path | None) -> None:
    while opens is not None and not opens.exists():
        time.sleep(0.01)
    _Server(("127.0.0.1", port), _Answer).serve_forever()


def _show(folder: Path, stub: int, plan: dict[str, Any]) -> None:
    """The page that the stub would have; this process beats in its place."""
    temporary = Path(tempfile.gettempdir())
    page = StatusPage(temporary, model="m", version="1", instance="m_0_0")
    (made,) = temporary.glob(f"stub-{os.getpid()}-*.status")
    stat = process_state.process_stat(stub)
    assert stat is not None
    made.rename(temporary / f"stub-{stub}-{stat.start_time}.status")
    outage = plan.get("outage", "")
    while True:
        if not (folder / "hang").exists():
            state = StubState.ENDING if plan.get("is_ending") else StubState.DOWN if outage else StubState.UP
            page.beat(state, outage)
            page.in_flight(plan["in_flight"])
        time.sleep(BEAT_SECONDS)


def main(folder: Path, *arguments: str) -> None:
    """Open the ports, start the stub, and serve until SIGTERM."""
    plan = json.loads((folder / "plan.json").read_text())
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    with (folder / "flags").open("a") as flags:
        flags.write(f"{' '.join(argument for argument in arguments if argument.startswith('--'))}\n")
    _Answer.folder = folder
    for line in plan.get("log", []):
        print(line, flush=True)
    if "exit_code" in plan:
        sys.exit(plan["exit_code"])
    stubs = []  # kept, as a Popen that goes collects its child if that is dead already, which tritonserver does not
    if not plan.get("no_stub"):
        stubs.append(subprocess.Popen([str(folder / "triton_python_backend_stub"), plan.get("stub_argument", "600")]))
    if "in_flight" in plan:
        threading.Thread(target=_show, args=(folder, stubs[0].pid, plan), daemon=True).start()
    for match in filter(None, (_PORT.fullmatch(argument) for argument in arguments)):
        name, port = match.groups()
        opens = folder / "open" if name in plan.get("delayed", []) else None
        threading.Thread(target=_listen, args=(int(port), opens), daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    if not plan.get("ends", True):
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main(Path(sys.argv[1]), *sys.argv[2:])
