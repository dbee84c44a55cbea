"""llama.cpp's server. Variants: bf16, q8_0. The command line is in runner.py.

16 slots for many requests and one for a single stream, each in a server of its own: the slots share the batch, and more
of them than are needed cost the single stream time. The workload goes in as token ids, over a Unix socket. Settings are
options of the server.
"""

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gguf_file
import runner

SLOTS = 16
ONE_STREAM = ("one_stream", "copying", "copying_prompt")
TOKENS_PER_SLOT, COPYING_TOKENS = 1024, 2048
READY_SECONDS = 120.0


def model_file(arguments: runner.Arguments, variant: str) -> Path:
    """Where the file of a variant is."""
    return arguments.converted / "llamacpp" / f"{arguments.model.name}-{variant}.gguf"


def prepare(arguments: runner.Arguments) -> None:
    """Convert the checkpoint to GGUF, and quantise it: seconds, once."""
    plain = model_file(arguments, "bf16")
    plain.parent.mkdir(parents=True, exist_ok=True)
    if not plain.exists():
        gguf_file.convert(arguments.model, plain.with_suffix(".partial"))
        plain.with_suffix(".partial").rename(plain)
    wanted = model_file(arguments, arguments.variant)
    if not wanted.exists():
        partial = wanted.with_suffix(".partial")
        command = [program("llama-quantize"), str(plain), str(partial), arguments.variant, str(arguments.threads)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        partial.rename(wanted)


def program(name: str) -> str:
    """One of the programs that setup.sh has put beside this environment's python."""
    return str(Path(sys.executable).with_name(name))


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=None)
        self.path = path

    def connect(self) -> None:
        """Instead of a TCP connection."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self.path)


class LlamaCpp:
    """`llama-server` with the number of slots that the workload asks for."""

    def __init__(self, arguments: runner.Arguments) -> None:
        self.arguments = arguments
        self.folder = tempfile.TemporaryDirectory(prefix="llama-")
        self.socket = f"{self.folder.name}/server.sock"
        self.process: subprocess.Popen[bytes] | None = None
        described = subprocess.run([program("llama-server"), "--version"], capture_output=True, text=True, check=True)
        words = (described.stderr + described.stdout).split()
        self.version = words[words.index("version:") + 1]
        self.slots = self.tokens_per_slot = 0
        self.reset(arguments.workloads[0])

    def generate(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        """All at once, one connection each."""
        made: list[list[int]] = [[] for _ in prompts]

        def ask(i: int) -> None:
            answer = self._post(
                "/completion",
                prompt=prompts[i],
                n_predict=output_lengths[i],
                ignore_eos=True,
                cache_prompt=self.arguments.prefix_caching,
                samplers=["top_k"],  # the shortest way to the most likely token
                top_k=1,
                return_tokens=True,
            )
            made[i] = answer["tokens"]

        threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    def reset(self, workload: str) -> None:
        """Start another server where this workload needs another number of slots, or longer ones."""
        slots = 1 if workload in ONE_STREAM else SLOTS
        tokens_per_slot = COPYING_TOKENS if workload.startswith("copying") else TOKENS_PER_SLOT
        if (slots, tokens_per_slot) != (self.slots, self.tokens_per_slot):
            self._stop()
            self.slots, self.tokens_per_slot = slots, tokens_per_slot
            self._start()

    def close(self) -> None:
        """End the server."""
        self._stop()
        self.folder.cleanup()

    def _stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=30)
        Path(self.socket).unlink(missing_ok=True)  # it leaves it behind, and would not start there again

    def _start(self) -> None:
        threads = str(self.arguments.threads)
        command = [program("llama-server"), "--model", str(model_file(self.arguments, self.arguments.variant))]
        command += ["--host", self.socket, "--parallel", str(self.slots)]
        command += ["--ctx-size", str(self.slots * self.tokens_per_slot), "--batch-size", "2048"]
        command += ["--threads", threads, "--threads-batch", threads, "--no-ui", "--log-verbosity", "2"]
        for name, value in json.loads(self.arguments.settings).items():
            command += [f"--{name}", str(value)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"llama-server did not start: {self.process.poll()}")
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        connection = Connection(self.socket)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        connection = Connection(self.socket)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return answer


if __name__ == "__main__":
    runner.main(LlamaCpp, prepare)
