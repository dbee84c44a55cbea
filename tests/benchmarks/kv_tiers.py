"""What KV blocks in memory or in files are worth: under memory pressure, and to streams whose engine is killed.

    python tests/benchmarks/kv_tiers.py [--memory] [--model FOLDER] [--prompts 32] [--length 320] [--streams 32]
                                        [--rounds 3]

1. A working set of four times the KV cache: the same prompts come again and again, one at a time, in another order each
   round. Share of the prompt tokens that were not computed, and the time to the first token, with a connector and
   without one, in turn.
2. Long streams, and a SIGKILL of their engine: seconds until each stream goes on, with a connector and without one.
   The engine's own start is in it, and the same for both.

With --memory blocks are in memory that engines share. Else the folder is a new one on the disk of the temporary
directory (`TMPDIR`). Its files may still be in the system's page cache when they are read: this measures the engine,
not the disk.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quire_engine import LLM, AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model"
VOCAB_SIZE = 4096
BLOCK_SIZE = 16
PRESSURE = 4
"""How many times as large as the cache the working set is."""


def connector(folder: str | None) -> dict[str, Any]:
    """Settings; without a folder, of memory."""
    if folder is None:
        return {"kv_transfer_config": {"kv_connector": "SharedMemoryConnector"}}
    extra = {"shared_storage_path": folder}
    return {"kv_transfer_config": {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}}


def make_prompts(number: int, length: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    rng = random.Random(0)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(length)] for _ in range(number)]


def bytes_per_block(model: Path) -> int:
    """As the engine sees it."""
    num_bytes = 64 << 20
    llm = LLM(model, kv_cache_memory_bytes=num_bytes)
    return num_bytes // llm.get_stats().num_blocks_free


def measure_pressure(model: Path, prompts: list[list[int]], rounds: int, folder: str | None) -> None:
    """Part 1."""
    num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) + 1 for prompt in prompts) // PRESSURE
    num_bytes = num_blocks * bytes_per_block(model)
    settings: dict[str, dict[str, Any]] = {"without": {}, "with": connector(folder)}
    engines = {name: LLM(model, kv_cache_memory_bytes=num_bytes, **own) for name, own in settings.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cached: dict[str, list[float]] = {name: [] for name in engines}
    rng = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for number in range(rounds + 1):
        order = rng.sample(prompts, len(prompts))
        for prompt in order:
            for name in sorted(engines, reverse=number % 2 == 1):
                began_at = time.perf_counter()
                (output,) = engines[name].generate([prompt], params, use_tqdm=False)
                if number > 0:  # the first time they are new
                    seconds[name].append(time.perf_counter() - began_at)
                    cached[name].append((output.num_cached_tokens or 0) / len(prompt))
    print(f"working set of {PRESSURE} times the KV cache ({num_blocks} blocks), prompts of {len(prompts[0])} tokens:")
    for name in engines:
        times = sorted(seconds[name])
        p50, p99 = 1000 * statistics.median(times), 1000 * times[int(0.99 * len(times))]
        print(
            f"  {name:8} connector: {statistics.mean(cached[name]):6.1%} of the prompt tokens not computed; "
            f"time to first token p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        )


async def pauses(model: Path, prompts: list[list[int]], settings: dict[str, Any]) -> list[float]:
    """Seconds from the kill of the engine until each stream goes on."""
    config = EngineConfig.from_settings({"model": str(model), "max_num_seqs": len(prompts), **settings})
    llm = AsyncLLM(config)
    await llm.start()
    last_token_at = [0.0] * len(prompts)
    num_tokens = [0] * len(prompts)

    async def follow(index: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )  # fmt: skip
        async for output in llm.generate({"prompt_token_ids": prompts[index]}, params):
            last_token_at[index] = time.monotonic()
            num_tokens[index] += len(output.outputs[0].token_ids)

    streams = [asyncio.create_task(follow(index)) for index in range(len(prompts))]
    try:
        while min(num_tokens) < BLOCK_SIZE:
            await asyncio.sleep(0.01)
            if any(stream.done() for stream in streams):
                raise SystemExit("streams end before their engine is killed: take shorter prompts, or a longer context")
        killed_at, killed = time.monotonic(), llm.engine_pid
        os.kill(killed, signal.SIGKILL)
        while llm.engine_pid == killed or min(last_token_at) <= killed_at + 0.2:
            await asyncio.sleep(0.002)
        return [at - killed_at for at in last_token_at]
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        llm.shutdown()


def measure_recovery(model: Path, prompts: list[list[int]], folder: str | None) -> None:
    """Part 2."""
    print(f"{len(prompts)} streams with prompts of {len(prompts[0])} tokens, engine killed:")
    for name, settings in (("without", {}), ("with", connector(folder))):
        found = sorted(asyncio.run(pauses(model, prompts, settings)))
        print(f"  {name:8} connector: streams go on after p50 {statistics.median(found):.2f} s, last {found[-1]:.2f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=320, help="tokens of a prompt")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = None if arguments.memory else folder
        measure_pressure(arguments.model, make_prompts(arguments.prompts, arguments.length), arguments.rounds, place)
    with tempfile.TemporaryDirectory() as folder:
        place = None if arguments.memory else folder
        measure_recovery(arguments.model, make_prompts(arguments.streams, arguments.length), place)


if __name__ == "__main__":
    main()
