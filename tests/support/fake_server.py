"""A stand-in for tritonserver, to test what watches over one: ports, a stub and a log, but no models and no GPU.

It runs as a program: `python fake_server.py FOLDER SERVICE=PORT...`. A test steers it with files in FOLDER:

    plan.json       "log": lines to print; "exit_code": what to end with at once; "no_stub": true; "stub_argument": what
                    the stub, a copy of `sleep`, gets; "delayed": services whose port opens once there is a file `open`
    starts          it writes one line for each of its starts: the id of its process
"""

import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        if self.rfile.readline().startswith(b"GET"):
            self.wfile.write(ANSWER)


def _listen(port: int, opens: Path | None) -> None:
    while opens is not None and not opens.exists():
        time.sleep(0.01)
    _Server(("127.0.0.1", port), _Answer).serve_forever()


def main(folder: Path, *services: str) -> None:
    """Open the ports, start the stub, and serve until SIGTERM."""
    plan = json.loads((folder / "plan.json").read_text())
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    for line in plan.get("log", []):
        print(line, flush=True)
    if "exit_code" in plan:
        sys.exit(plan["exit_code"])
    stubs = []  # kept, as a Popen that goes collects its child if that is dead already, which tritonserver does not
    if not plan.get("no_stub"):
        stubs.append(subprocess.Popen([str(folder / "triton_python_backend_stub"), plan.get("stub_argument", "600")]))
    for service in services:
        name, _, port = service.partition("=")
        opens = folder / "open" if name in plan.get("delayed", []) else None
        threading.Thread(target=_listen, args=(int(port), opens), daemon=True).start()
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main(Path(sys.argv[1]), *sys.argv[2:])
