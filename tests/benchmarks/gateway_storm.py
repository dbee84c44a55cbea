"""Storms on the OpenAI gateway: connections that all stream, of which many read slowly and all vanish in the middle.

    python tests/benchmarks/gateway_storm.py [--connections 500] [--seconds 10] [--storms 3]

Of the connections a third reads what comes, a third a byte now and then, and a third nothing at all; some seconds after
the last has arrived, all are reset at once. After each storm the engine has to be idle with all of its KV blocks free,
the gateway has to hold no connection and the memory that it held after the storm before, and the next request has to be
answered. Prints what was found, and ends with 1 if it is not so.
"""

import argparse
import asyncio
import itertools
import json
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.clients import scrape  # noqa: E402
from support.processes import children, command_line  # noqa: E402
from support.serving import Server, serve, wait_until  # noqa: E402

MODEL = "tinypy"
REQUESTS = ("quire_requests_running", "quire_requests_waiting")
DEADLINE_S = 300.0
MAX_GROWTH_MIB = 8.0
"""Of the gateway, from one storm to the next, the first left out: what its allocator may keep in holes."""


def request(host: str, body: dict[str, object]) -> bytes:
    """The bytes of a completion's request."""
    content = json.dumps({"model": MODEL, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def storm(server: Server, num_connections: int, seconds: float) -> int:
    """Stream to that many clients for a while, then have all of them vanish.

    Returns:
        How many bytes they have read.
    """
    host, _, port = server.openai.rpartition(":")
    over = asyncio.Event()
    num_bytes = 0

    async def client(number: int) -> None:
        nonlocal num_bytes
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what is not read soon stays with the gateway
        reader, writer = await asyncio.open_connection(sock=connection, limit=1)
        body = {"prompt": f"# {number}\n", "stream": True, "logprobs": 5, "max_tokens": 1000, "ignore_eos": True}
        writer.write(request(host, body))

        async def read() -> None:
            nonlocal num_bytes
            while number % 3 < 2 and (data := await reader.read(1 if number % 3 else 65536)):
                num_bytes += len(data)
                await asyncio.sleep(0.5 if number % 3 else 0)

        task = asyncio.create_task(read())
        await over.wait()
        task.cancel()
        writer.transport.abort()

    clients = [asyncio.create_task(client(number)) for number in range(num_connections)]
    # Or those that are still on their way would only arrive when their clients are gone.
    await asyncio.to_thread(
        wait_until, lambda: num_held(server, *REQUESTS) >= num_connections, "all are there", DEADLINE_S
    )
    await asyncio.sleep(seconds)
    over.set()
    await asyncio.gather(*clients)
    return num_bytes


def resident_mib(pid: int) -> float:
    """The memory that a process has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def seconds_until(is_true: Callable[[], bool], what: str) -> float:
    """How long it takes."""
    start = perf_counter()
    wait_until(is_true, what, DEADLINE_S)
    return perf_counter() - start


def num_held(server: Server, *names: str) -> float:
    """The sum of some metrics, over all of their series but those of free and cached blocks."""
    return sum(sample.value for sample in scrape(server)
               if sample.name in names and sample.labels.get("state", "used") == "used")  # fmt: skip


def answer(server: Server) -> None:
    """One request, to its end."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3}).encode()
    said = urllib.request.Request(f"http://{server.openai}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(said, timeout=DEADLINE_S) as response:
        assert json.load(response)["choices"][0]["text"]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--storms", type=int, default=3)
    args = parser.parse_args()
    with serve("--openai", "--openai-port", "0") as server:
        (pid,) = [pid for pid in children(server.process.pid) if "quire_gateway" in command_line(pid)]
        descriptors = Path(f"/proc/{pid}/fd")

        def settle() -> tuple[float, float]:
            idle_s = seconds_until(lambda: not num_held(server, *REQUESTS, "quire_kv_blocks"), "all blocks are free")
            start = perf_counter()
            answer(server)
            answer_s = perf_counter() - start
            wait_until(lambda: len(list(descriptors.iterdir())) <= num_open, "no connection is left", DEADLINE_S)
            return idle_s, answer_s

        for _ in range(8):  # the gateway opens its connections to the server one after the other, as they are needed
            answer(server)
        num_open, resident = len(list(descriptors.iterdir())), [resident_mib(pid)]
        print(f"before: {resident[0]:.1f} MiB, {num_open} descriptors", flush=True)
        for number in range(1, args.storms + 1):
            num_bytes = asyncio.run(storm(server, args.connections, args.seconds))
            during = resident_mib(pid)
            idle_s, answer_s = settle()
            resident.append(resident_mib(pid))
            print(
                f"storm {number}: {args.connections} connections, {num_bytes / 1e6:.1f} MB read, {during:.1f} MiB; "
                f"idle with all blocks free after {idle_s:.2f} s, the next answer in {answer_s:.2f} s; "
                f"then {resident[-1]:.1f} MiB, {len(list(descriptors.iterdir()))} descriptors",
                flush=True,
            )
    growth = max([0.0, *(after - before for before, after in itertools.pairwise(resident[1:]))])
    print(f"grown from one storm to the next: {growth:.1f} MiB at most (may be {MAX_GROWTH_MIB:.0f})")
    return int(growth > MAX_GROWTH_MIB)


if __name__ == "__main__":
    sys.exit(main())
