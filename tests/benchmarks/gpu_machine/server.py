"""A whole tritonserver with a dummy model under many gRPC streams, once: do all end well, how fast, how soon.

    python tests/benchmarks/gpu_machine/server.py [--model 1B] [--streams 64] [--prompt 256] [--tokens 256] [--log FILE]

Exit code 1 where a stream has ended with an error, or with another number of tokens than it was to have.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "benchmarks")]

from gpu_sections.models import CONFIGS, make_folder  # noqa: E402
from support.measured_load import Measured, send_all  # noqa: E402
from support.serving import Server, serve  # noqa: E402
from tritonclient.grpc import aio as grpc_aio  # noqa: E402

LIMIT_SECONDS = 240.0


def requests_of(arguments: argparse.Namespace, count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Prompts of random token ids, greedy answers of so many tokens."""
    rng = random.Random(count)
    vocab_size = CONFIGS[arguments.model]["vocab_size"]
    return [
        {
            "model": arguments.model,
            "input_ids": [rng.randrange(2, vocab_size) for _ in range(arguments.prompt)],
            "temperature": 0.0,
            "max_tokens": num_tokens,
            "parameters": {"ignore_eos": True},
        }
        for _ in range(count)
    ]


def load(server: Server, requests: list[dict[str, Any]]) -> list[Measured]:
    """All at the same time, each on a stream of its own."""

    async def work() -> list[Measured]:
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            return await asyncio.wait_for(send_all(client, requests, len(requests)), LIMIT_SECONDS)

    return asyncio.run(work())


def report(measured: list[Measured], seconds: float, num_tokens: int) -> bool:
    """Print the figures; whether all streams have ended well."""
    bad = [one for one in measured if one.error or one.num_tokens != num_tokens or one.finish_reason != "length"]
    made = sum(one.num_tokens for one in measured)
    print(f"throughput   {made / seconds:10.0f} tokens/s ({made} tokens in {seconds:.2f} s)")
    firsts = sorted(one.ttft_seconds for one in measured if one.ttft_seconds is not None)
    if firsts:
        slow = firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))]
        print(f"first token  {1e3 * statistics.median(firsts):10.0f} ms median, {1e3 * slow:.0f} ms of 99 in 100")
    print(f"ended well   {len(measured) - len(bad):10} of {len(measured)} streams")
    for one in bad[:5]:
        print(f"  {one.num_tokens} tokens, finish reason {one.finish_reason!r}, {one.error or 'no error'}")
    return not bad


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGS), default="1B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a further setting")
    parser.add_argument("--log", type=Path, help="file for what the server writes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as folder:
        version = Path(folder, "repository", arguments.model, "1")
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text('backend: "quire"\n')
        settings = {
            "model": str(make_folder(arguments.model, Path(folder))),
            "load_format": "dummy",
            "max_model_len": arguments.prompt + arguments.tokens,
            "max_num_seqs": arguments.streams,
            **{name: json.loads(value) for name, _, value in (item.partition("=") for item in arguments.set)},
        }
        (version / "model.json").write_text(json.dumps(settings))
        began = time.perf_counter()
        with serve("--model-repository", str(version.parents[1])) as server:
            print(f"ready        {time.perf_counter() - began:10.1f} s after its start")
            try:
                load(server, requests_of(arguments, 4, 16))
                requests = requests_of(arguments, arguments.streams, arguments.tokens)
                start = time.perf_counter()
                measured = load(server, requests)
                is_well = report(measured, time.perf_counter() - start, arguments.tokens)
            finally:
                if arguments.log:
                    shutil.copy(server.log_file, arguments.log)
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
