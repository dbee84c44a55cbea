"""How long requests pause when their engine is killed: structured ones next to others, and the first one after a start.

    python tests/benchmarks/recovery.py [--kills N] [--model PATH]

Half of the streams follow a grammar, each of its own, so that every one has to be compiled again by the next engine.
"""

import argparse
import asyncio
import os
import signal
import statistics
import time
from pathlib import Path

from quire_engine import AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams
from quire_engine.structured_outputs_params import StructuredOutputsParams

TINYPY = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model"
NUM_STREAMS = 8
"""Of each kind."""
FREE, STRUCTURED = "free", "structured"


class Streams:
    """Streams that go on for ever, and when each got its last token."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.last_token_at: dict[tuple[str, int], float] = {}
        self._num_started = 0
        self._recovered: dict[tuple[str, int], float] = {}

    async def follow(self, kind: str, index: int) -> None:
        """One stream after the other."""
        while True:
            self._num_started += 1
            regex = f"[a-z]{{400}}{self._num_started}"  # a grammar that no engine has compiled before
            params = SamplingParams(
                max_tokens=300, ignore_eos=True, seed=index, output_kind=RequestOutputKind.DELTA,
                structured_outputs=StructuredOutputsParams(regex=regex) if kind == STRUCTURED else None,
            )  # fmt: skip
            async for _ in self._llm.generate("x = ", params):
                self.last_token_at[kind, index] = time.monotonic()

    async def pauses_after_kill(self) -> dict[str, list[float]]:
        """Kill the engine core; seconds until each stream goes on."""
        killed_at = time.monotonic()
        restarted_from = self._llm.engine_pid
        os.kill(restarted_from, signal.SIGKILL)
        while self._llm.engine_pid == restarted_from or any(
            at <= killed_at + 0.2 for at in self.last_token_at.values()
        ):
            await asyncio.sleep(0.002)
            for key in [key for key, at in self.last_token_at.items() if at > killed_at + 0.2]:
                self._recovered.setdefault(key, self.last_token_at[key] - killed_at)
        recovered, self._recovered = self._recovered, {}
        return {kind: [pause for (of, _), pause in recovered.items() if of == kind] for kind in (FREE, STRUCTURED)}


async def first_structured(llm: AsyncLLM) -> float:
    """Seconds until the first structured request after a start has its first token."""
    began_at = time.monotonic()
    params = SamplingParams.from_mapping({"max_tokens": 1, "structured_outputs": {"json": {"type": "object"}}})
    async for _ in llm.generate("x = ", params):
        pass
    return time.monotonic() - began_at


async def measure(llm: AsyncLLM, num_kills: int) -> None:
    await llm.start()
    print(f"the first structured request after the start: {await first_structured(llm):.2f} s")
    streams = Streams(llm)
    tasks = [
        asyncio.ensure_future(streams.follow(kind, index))
        for kind in (FREE, STRUCTURED)
        for index in range(NUM_STREAMS)
    ]
    while len(streams.last_token_at) < len(tasks):
        await asyncio.sleep(0.01)
        for task in tasks:
            if task.done():
                task.result()
    pauses: dict[str, list[float]] = {FREE: [], STRUCTURED: []}
    for number in range(num_kills):
        await asyncio.sleep(1.0)
        after_one = await streams.pauses_after_kill()
        for kind, seconds in after_one.items():
            pauses[kind] += seconds
        medians = ", ".join(f"{kind} {statistics.median(seconds):.2f} s" for kind, seconds in after_one.items())
        print(f"kill {number + 1}: {medians}")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for kind, seconds in pauses.items():
        print(f"{kind}: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s")
    print(f"ratio of the medians: {statistics.median(pauses[STRUCTURED]) / statistics.median(pauses[FREE]):.2f}")


def main() -> None:
    """Print it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="how often the engine is killed")
    parser.add_argument("--model", type=Path, default=TINYPY, help="a checkpoint folder")
    arguments = parser.parse_args()
    began_at = time.monotonic()
    llm = AsyncLLM(EngineConfig.from_settings({"model": str(arguments.model)}))
    print(f"ready after {time.monotonic() - began_at:.2f} s")
    try:
        asyncio.run(measure(llm, arguments.kills))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
