"""What the OpenAI gateway costs: streamed tokens/s through it, and through gRPC alone.

    python tests/benchmarks/gateway.py [--streams 16 64] [--tokens 128] [--runs 5]

The same prompts, greedy, end-of-sequence ignored, through the same server, in turn; medians are printed with their
ratio (goal: at least 0.90), and the CPU time per token of each process. Clients are on the same machine, so their work
counts too: each is as thin as its protocol allows, and reads the text of every response.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import uvloop  # noqa: E402
from quire_gateway.triton_client import TritonClient  # noqa: E402
from support.processes import children, cpu_seconds_by_name  # noqa: E402
from support.serving import Server, serve  # noqa: E402

MODEL = "tinypy"
PROCESSES = {
    "quire_engine.core.core_process": "engine",
    "python_backend_stub": "stub",
    "bin/tritonserver": "tritonserver",
    "quire_gateway": "gateway",
}


def sampling(num_tokens: int) -> dict[str, Any]:
    """The same for both."""
    return {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}


def processes_of(server: Server) -> set[int]:
    """The gateway is not of the run that tritonserver is."""
    return {*server.run_id.processes(), *children(server.process.pid)}


async def over_grpc(server: Server, prompts: list[str], num_tokens: int) -> list[str]:
    """The texts, by the gateway's own client, so that HTTP and JSON are all that differs."""
    client = TritonClient(server.grpc)

    async def one(prompt: str) -> str:
        deltas = client.generate(MODEL, prompt, sampling(num_tokens), stream=True, request_id="")
        return "".join([delta.texts[0] async for delta in deltas])

    texts = await asyncio.gather(*map(one, prompts))
    await client.close()
    return texts


class _Events(asyncio.Protocol):
    """The texts of a stream of completions."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if (start := event.find(b"data: {")) >= 0:  # after the size of a part, or after the headers
                self.texts.append(json.loads(event[start + 6 :])["choices"][0]["text"])

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def over_http(server: Server, prompts: list[str], num_tokens: int) -> list[str]:
    """The texts, by a client of HTTP/1.1 that does no more than read events."""
    host, _, port = server.openai.rpartition(":")

    async def one(prompt: str) -> str:
        transport, events = await asyncio.get_running_loop().create_connection(_Events, host, int(port))
        body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True, **sampling(num_tokens)}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        transport.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await events.ended
        return "".join(events.texts)

    return await asyncio.gather(*map(one, prompts))


def measure(server: Server, num_streams: int, args: argparse.Namespace) -> None:
    """Alternate, and print medians."""
    ways = {"gRPC": over_grpc, "gateway": over_http}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, Counter[str]] = {way: Counter() for way in ways}
    for run in range(args.runs + 1):
        # New prompts for every run, so that no run profits from the prefixes of an earlier one.
        prompts = [f"# {num_streams}.{run}.{i}\ndef function_{i}(a, b):\n" for i in range(num_streams)]
        texts = []
        for way in sorted(ways, reverse=bool(run % 2)):
            before = cpu_seconds_by_name(processes_of(server), PROCESSES)
            start = perf_counter()
            texts.append(uvloop.run(ways[way](server, prompts, args.tokens)))
            seconds = perf_counter() - start
            if run:  # the first one warms up
                rates[way].append(num_streams * args.tokens / seconds)
                cpu[way] += cpu_seconds_by_name(processes_of(server), PROCESSES) - before
        assert texts[0] == texts[1]
    base = statistics.median(rates["gRPC"])
    ratios = [through / alone for through, alone in zip(rates["gateway"], rates["gRPC"], strict=True)]
    for way in ways:
        shares = ", ".join(
            f"{name} {1e6 * seconds / (args.runs * num_streams * args.tokens):.0f}"
            for name, seconds in cpu[way].most_common()
        )
        median = statistics.median(rates[way])
        print(f"{num_streams:3} streams  {way:8} {median:7.0f} tok/s  {median / base:.2f}   CPU µs/token: {shares}")
    print(f"{num_streams:3} streams  ratio of each run: median {statistics.median(ratios):.2f}, "
          f"from {min(ratios):.2f} to {max(ratios):.2f}", flush=True)  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with serve("--openai", "--openai-port", "0") as server:
        for num_streams in args.streams:
            measure(server, num_streams, args)


if __name__ == "__main__":
    main()
