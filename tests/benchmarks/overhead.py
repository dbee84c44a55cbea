"""What serving costs: tokens/s of the engine offline, and through tritonserver over gRPC streams.

    python tests/benchmarks/overhead.py [--model FOLDER] [--streams 16] [--tokens 256] [--runs 5]

The same prompts, greedy, end-of-sequence ignored; offline and served runs alternate, and medians are printed with their
ratio (goal: at least 0.80). The client runs on the same machine, so its work counts as overhead too. On a machine that
others use as well the ratio says little: three processes get a larger share of it than one. CPU times still compare.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from quire_engine import LLM, SamplingParams  # noqa: E402
from support.clients import ask  # noqa: E402
from support.processes import cpu_seconds_by_name  # noqa: E402
from support.serving import Server, serve  # noqa: E402
from tritonclient.grpc import aio as grpc_aio  # noqa: E402

CONFIG = 'backend: "quire"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
KV_CACHE_BYTES = 256 * 2**20
PROCESSES = {
    "quire_engine.core.core_process": "engine",
    "python_backend_stub": "stub",
    "bin/tritonserver": "tritonserver",
}


def write_repository(folder: Path, settings: dict[str, Any]) -> None:
    """A model repository with the one model `bench`."""
    (folder / "bench" / "1").mkdir(parents=True)
    (folder / "bench" / "config.pbtxt").write_text(CONFIG)
    (folder / "bench" / "1" / "model.json").write_text(json.dumps(settings))


def run_offline(llm: LLM, prompts: list[str], num_tokens: int) -> float:
    """Tokens/s of one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


async def run_served(server: Server, prompts: list[str], num_tokens: int, stream: bool) -> tuple[float, float]:
    """(tokens/s, responses/s) of the same batch, one gRPC stream per prompt."""
    params = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    async with grpc_aio.InferenceServerClient(server.grpc) as client:
        await client.is_server_ready()
        start = time.perf_counter()
        requests = [
            ask(client, model="bench", outputs=["text_output"], text_input=prompt, stream=stream, **params)
            for prompt in prompts
        ]
        answers = await asyncio.gather(*requests)
        seconds = time.perf_counter() - start
    assert all(answer.text for answer in answers)
    return len(prompts) * num_tokens / seconds, sum(len(answer.responses) for answer in answers) / seconds


def measure(server: Server, llm: LLM, args: argparse.Namespace) -> None:
    """Alternate, and print medians."""
    offline, streamed, whole, responses = [], [], [], []
    cpu: Counter[str] = Counter()
    for i in range(args.runs + 1):
        # New prompts for every run, so that no run profits from the prefixes of an earlier one.
        prompts = [f"# {i}.{j}\ndef function_{j}(a, b):\n" for j in range(args.streams)]
        offline_rate = run_offline(llm, prompts, args.tokens)
        before = cpu_seconds_by_name(server.run_id.processes(), PROCESSES)
        streamed_rate, response_rate = asyncio.run(run_served(server, prompts, args.tokens, stream=True))
        used = cpu_seconds_by_name(server.run_id.processes(), PROCESSES) - before
        whole_rate, _ = asyncio.run(run_served(server, prompts, args.tokens, stream=False))
        if i == 0:
            continue  # warm-up
        for values, value in ((offline, offline_rate), (streamed, streamed_rate), (whole, whole_rate),
                              (responses, response_rate)):  # fmt: skip
            values.append(value)
        cpu += used
        rates = f"offline {offline_rate:.0f}, streamed {streamed_rate:.0f}, not streamed {whole_rate:.0f} tok/s"
        print(f"run {i}: {rates}", flush=True)
    base = statistics.median(offline)
    print(f"offline      {base:8.0f} tok/s")
    for name, values in (("streamed", streamed), ("not streamed", whole)):
        median = statistics.median(values)
        print(f"{name:12} {median:8.0f} tok/s   ratio {median / base:.2f}")
    print(f"responses    {statistics.median(responses):8.0f} /s while streaming")
    tokens = args.runs * args.streams * args.tokens
    shares = ", ".join(f"{name} {1e6 * seconds / tokens:.0f}" for name, seconds in cpu.most_common())
    print(f"CPU time of a streamed token, in µs: {shares}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "model_repository" / "tinypy" / "1" / "model"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="a further setting of model.json"
    )
    args = parser.parse_args()
    settings: dict[str, Any] = {"model": str(Path(args.model).resolve()), "dtype": "float32",
                                "max_model_len": 1024, "kv_cache_memory_bytes": KV_CACHE_BYTES}  # fmt: skip
    settings |= {name: json.loads(value) for name, _, value in (item.partition("=") for item in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), settings)
        with serve("--model-repository", folder) as server:
            llm = LLM(**settings)
            measure(server, llm, args)
            llm.shutdown()


if __name__ == "__main__":
    main()
