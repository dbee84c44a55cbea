"""What a snapshot costs: the engine core's part, between two steps, and the frontend's, with 64 running requests.

Run it as `python tests/benchmarks/introspection.py`. The requests run on the demo model in this process; each part is
measured alone, so the figures are those of one snapshot, and say what one per second takes of the time.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from quire_engine.config import EngineConfig
from quire_engine.core.build_engine import build_engine
from quire_engine.frontend.introspection import combine_blocks
from quire_engine.messages import EngineCoreRequest
from quire_engine.sampling_params import SamplingParams
from quire_engine.snapshot import EngineCoreSnapshot

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "tinypy" / "1" / "model"
NUM_REQUESTS = 64
NUM_BLOCKS = 16384
REPEATS = 200


def median_ms(work: Callable[[], object]) -> float:
    """Median time of a call, in milliseconds."""
    seconds = []
    for _ in range(REPEATS):
        began_at = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_at)
    return 1000 * statistics.median(seconds)


def main() -> None:
    """Print the cost of each part."""
    settings = {"model": str(CHECKPOINT), "dtype": "float32"}
    core = build_engine(EngineConfig.from_settings(settings), NUM_BLOCKS)
    for i in range(NUM_REQUESTS):
        params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
        core.add_request(EngineCoreRequest(f"r{i}", [i + 3] * 300, params))
    for _ in range(20):
        core.step()
    snapshot = core.snapshot()
    encoded = msgspec.msgpack.encode(snapshot)
    decoder = msgspec.msgpack.Decoder(EngineCoreSnapshot)
    in_core = median_ms(lambda: msgspec.msgpack.encode(core.snapshot()))
    in_frontend = median_ms(lambda: combine_blocks(decoder.decode(encoded), snapshot.requests))
    core.shutdown()
    print(f"{NUM_REQUESTS} running requests, {NUM_BLOCKS} blocks, {len(encoded):,} bytes between the processes")
    print(f"engine core {in_core:.2f} ms, frontend {in_frontend:.2f} ms per snapshot")
    print(f"one per second takes {in_core / 10:.3f}% of the engine core's time")


if __name__ == "__main__":
    main()
