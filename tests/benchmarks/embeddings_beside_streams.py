"""What bursts of embeddings cost the streams of an LLM in the same server: the longest gap and the 99th percentile.

    python tests/benchmarks/embeddings_beside_streams.py [--llm PATH] [--embedder PATH] [--streams 4] [--seconds 20]

Each row is a server of its own with both models: no embeddings; batches of texts of 128 tokens in a closed loop; the
same with fewer tokens per step of the embedder; the same with its processes at a lower priority, and both. Embeddings
per second stand beside the gaps, as a policy that starves the embedder is none.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from quire_client import Client  # noqa: E402
from support.real_models import minilm, smollm2  # noqa: E402
from support.serving import run_cli, serve  # noqa: E402

TOKEN = "a token of this benchmark"
TEXT_TOKENS, BATCH, NUM_BURSTS = 128, 64, 2
FEW_TOKENS = 512
NICENESS = 10
ROWS = {
    "no embeddings": (False, None, 0),
    "embeddings": (True, None, 0),
    f"max_num_batched_tokens={FEW_TOKENS}": (True, FEW_TOKENS, 0),
    f"niceness {NICENESS}": (True, None, NICENESS),
    "both": (True, FEW_TOKENS, NICENESS),
}
"""Name → whether there are any, tokens per step of the embedder, its niceness."""


def gaps_of(url: str, seconds: float) -> list[float]:
    """Seconds between the responses of one stream after another."""
    gaps: list[float] = []
    end = perf_counter() + seconds
    with Client(url) as client:
        while perf_counter() < end:
            before: float | None = None
            for _ in client.stream("llm", "Once upon a time", max_tokens=200, temperature=0, ignore_eos=True):
                now = perf_counter()
                gaps += [] if before is None else [now - before]
                before = now
    return gaps


def measure(url: str, num_streams: int, seconds: float, *, has_bursts: bool) -> tuple[list[float], float]:
    """The gaps of all streams, and embeddings per second beside them."""
    done, gaps, embedded = threading.Event(), list[float](), list[int]()

    def burst() -> None:
        with Client(url) as client:
            while not done.is_set():
                embedded.append(len(client.embed("embedder", [[1000 + i for i in range(TEXT_TOKENS)]] * BATCH).data))

    def stream() -> None:
        gaps.extend(gaps_of(url, seconds))

    bursts = [threading.Thread(target=burst) for _ in range(NUM_BURSTS * has_bursts)]
    streams = [threading.Thread(target=stream) for _ in range(num_streams)]
    start = perf_counter()
    for thread in (*bursts, *streams):
        thread.start()
    for thread in streams:
        thread.join()
    took = perf_counter() - start
    done.set()
    for thread in bursts:
        thread.join()
    return sorted(gaps), sum(embedded) / took


def main() -> None:
    """Print a row per policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", type=Path, default=None, help="Default: SmolLM2-135M-Instruct.")
    parser.add_argument("--embedder", type=Path, default=None, help="Default: all-MiniLM-L6-v2.")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    llm, embedder = given.llm or smollm2(), given.embedder or minilm()
    print(f"{'':32}{'median gap':>12}{'p99':>10}{'longest':>10}{'embeddings/s':>14}")
    for name, (has_bursts, num_tokens, niceness) in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            own = [] if num_tokens is None else [f"max_num_batched_tokens={num_tokens}"]
            for path, model, words in ((llm, "llm", ["stream_interval_ms=0"]), (embedder, "embedder", own)):
                token = [f'introspection_token="{TOKEN}"']
                added = run_cli(
                    "model", "add", str(path), *words, *token, "--name", model, "--model-repository", folder
                )
                assert added.returncode == 0, added.stderr
            with serve("--model-repository", folder) as server:
                if niceness:
                    with Client(server.grpc, TOKEN) as client:
                        engine = client.snapshot("embedder").engine
                        for pid in {engine.pid, *(rank.pid for rank in engine.ranks)}:
                            for thread in Path(f"/proc/{pid}/task").iterdir():
                                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
                measure(server.grpc, 1, 1.0, has_bursts=has_bursts)
                gaps, rate = measure(server.grpc, given.streams, given.seconds, has_bursts=has_bursts)
        p99 = gaps[int(0.99 * (len(gaps) - 1))]
        shown = "".join(f"{1000 * one:>9.1f} ms" for one in (statistics.median(gaps), p99, gaps[-1]))
        print(f"{name:32}{shown}{rate:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
