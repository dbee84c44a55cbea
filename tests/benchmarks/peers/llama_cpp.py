"""llama.cpp's server. Variants: the types that `llama-quantize` writes, and `gguf`, the file that the checkpoint was
published as. The command line is in runner.py.

Up to 16 slots, one for a single stream, in a server of its own: the slots share the batch, and more of them than are
needed cost the single stream time. The workload goes in as token ids, over a Unix socket. Settings are options of the
server.
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
from workload import make_workload

SLOTS = 16
READY_SECONDS = 120.0


def model_file(arguments: runner.Arguments, variant: str) -> Path:
    """Where the file of a variant is."""
    if variant == "gguf":
        return arguments.model / "model.gguf"
    return arguments.converted / "llamacpp" / f"{arguments.model.name}-{variant}.gguf"


def prepare(arguments: runner.Arguments) -> None:
    """Convert the checkpoint, or the GGUF file that it was published as, to bf16, and quantise that: seconds, once."""
    published, plain = model_file(arguments, "gguf"), model_file(arguments, "bf16")
    plain.parent.mkdir(parents=True, exist_ok=True)
    if arguments.variant == "gguf":
        if not published.exists():
            raise SystemExit(f"{arguments.model.name} was not published as GGUF")
    elif not plain.exists():
        if published.exists():
            _quantize(published, plain, "bf16", arguments.threads)
        else:
            gguf_file.convert(arguments.model, plain.with_suffix(".partial"))
            plain.with_suffix(".partial").rename(plain)
    wanted = model_file(arguments, arguments.variant)
    if not wanted.exists():
        _quantize(plain, wanted, arguments.variant, arguments.threads)


def _quantize(source: Path, wanted: Path, variant: str, threads: int) -> None:
    partial = wanted.with_suffix(".partial")
    command = [program("llama-quantize"), "--allow-requantize", str(source), str(partial), variant, str(threads)]
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
        """Start another server where this workload needs another number of slots, or other lengths."""
        work = make_workload(workload, self.arguments.requests)
        slots = min(SLOTS, len(work.prompts))
        longest = max(len(prompt) + length for prompt, length in zip(work.prompts, work.output_lengths, strict=True))
        tokens_per_slot = (longest // 1024 + 1) * 1024
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
