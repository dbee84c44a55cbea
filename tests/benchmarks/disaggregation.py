"""What long prompts cost others: prefill and decode apart, next to as many replicas that do both, on the same cores.

    python tests/benchmarks/disaggregation.py [--model FOLDER] [--streams 6] [--prompts 24] [--length 800] [--rounds 3]

Streams with short prompts run all the time, each followed by the next one, while long prompts arrive at random. Of the
streams: the time between tokens. Of the long prompts: the time to the first token, and from there to the second, where
the blocks are handed over. The two kinds of engine take turns, each with the same arrivals; all blocks are new.

Blocks go through memory that the engines share, and through files of a new folder in /dev/shm, or below --folder, which
is deleted in the end.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_engine import AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model"
VOCAB_SIZE = 4096
SHORT_PROMPT = 8
"""Tokens; less than a block: nothing of it is handed over."""
STREAM_TOKENS = 200
PROMPT_TOKENS = 8
"""That each long prompt is answered with."""


@dataclass
class Times:
    """Seconds."""

    between_tokens: list[float] = field(default_factory=list)
    to_first: list[float] = field(default_factory=list)
    to_second: list[float] = field(default_factory=list)


class Load:
    """One engine under load."""

    def __init__(self, llm: AsyncLLM, times: Times, seed: int) -> None:
        self._llm, self._times, self._random = llm, times, random.Random(seed)
        self._is_measuring = False
        self._num_tokens = 0

    async def run(self, num_streams: int, num_prompts: int, length: int, per_second: float) -> None:
        """Until all long prompts are answered."""
        streams = [asyncio.ensure_future(self._stream()) for _ in range(num_streams)]
        try:
            while self._num_tokens < 10 * num_streams:
                await asyncio.sleep(0.01)
            self._is_measuring = True
            asked = []
            for _ in range(num_prompts):
                await asyncio.sleep(self._random.expovariate(per_second))
                asked.append(asyncio.ensure_future(self._ask(self._tokens(length))))
            await asyncio.gather(*asked)
            self._is_measuring = False
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(5, VOCAB_SIZE) for _ in range(number)]

    async def _stream(self) -> None:
        while True:
            last_at: float | None = None
            async for output in self._llm.generate(self._tokens(SHORT_PROMPT), params(STREAM_TOKENS)):
                now, count = time.perf_counter(), len(output.outputs[0].token_ids)
                self._num_tokens += count
                if last_at is not None and self._is_measuring:
                    self._times.between_tokens += [(now - last_at) / count] * count
                last_at = now

    async def _ask(self, prompt: list[int]) -> None:
        began_at, first_at, num_tokens = time.perf_counter(), 0.0, 0
        async for output in self._llm.generate(prompt, params(PROMPT_TOKENS)):
            now = time.perf_counter()
            if num_tokens == 0:
                first_at = now
                self._times.to_first.append(now - began_at)
            elif num_tokens == 1:
                self._times.to_second.append(now - first_at)
            num_tokens += len(output.outputs[0].token_ids)


def params(max_tokens: int) -> SamplingParams:
    """Greedy, of a fixed length, streamed."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def measure(arguments: argparse.Namespace, settings: dict[str, Any], times: Times, seed: int) -> None:
    """One engine, from its start to its end."""
    values = {"model": str(arguments.model), "data_parallel_size": 2, "kv_cache_memory_bytes": 256 << 20, **settings}
    llm = AsyncLLM(EngineConfig.from_settings(values))
    try:
        load = Load(llm, times, seed)
        asyncio.run(load.run(arguments.streams, arguments.prompts, arguments.length, arguments.per_second))
    finally:
        llm.shutdown()


def percentiles(seconds: list[float]) -> str:
    """Milliseconds."""
    in_order = sorted(seconds)
    return f"p50 {1000 * statistics.median(in_order):7.1f}  p99 {1000 * in_order[int(0.99 * len(in_order))]:7.1f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=24, help="long ones, in each round")
    parser.add_argument("--length", type=int, default=800, help="tokens of a long prompt")
    parser.add_argument("--per-second", type=float, default=3.0, help="long prompts that arrive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    names = {"two that do both": None, "apart, by memory": "memory", "apart, by files": "files"}
    times = {name: Times() for name in names}
    for number in range(arguments.rounds):
        for name, way in sorted(names.items(), reverse=number % 2 == 1):
            with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="quire-kv-") as folder:
                extra = {"shared_storage_path": folder, "max_bytes": 2 << 30}
                transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
                settings: dict[str, Any] = {} if way is None else {"disaggregation": {"prefill": 1, "decode": 1}}
                if way == "files":
                    settings["kv_transfer_config"] = transfer
                measure(arguments, settings, times[name], seed=number)
    print(f"{arguments.streams} streams, prompts of {arguments.length} tokens, {arguments.per_second} a second:")
    for name, measured in times.items():
        print(f"  {name:18} between tokens of the streams  {percentiles(measured.between_tokens)}")
        print(f"  {'':18} prompts: to the first token     {percentiles(measured.to_first)}")
        print(f"  {'':18} prompts: first to second token  {percentiles(measured.to_second)}")


if __name__ == "__main__":
    main()
