"""What LoRA adapters cost: the decode step of a batch whose requests have different ones, next to the base alone; and
the longest gap of streams while another adapter is loaded.

    python tests/benchmarks/adapters.py [--model m400 | --dummy 1B] [--rows 32] [--adapters 1 8 32] [--rank 16]
                                        [--rounds 5] [--set NAME=JSON] [--json FILE] [--zipf 200 [--requests 400]]

Three engines in one process take turns, every other round in reverse: two that serve no adapters, and one that does,
whose batch then has no adapter, or 1, 8, 32 different ones. A ratio is the speed relative to the first; that of the
second is what the machine's noise makes of 1. A step of few rows waits for memory, so a line also says how large the
matrices of the adapters are, relative to those that they change. A step's time is the difference between two runs of
the same prompts, one of a few tokens and one of more. On a GPU, take a dummy: its weights are not read.

With --zipf, it serves requests of so many adapters instead, the n-th with a probability in proportion to 1/n. Those
that are ready take 2 GB at most, others are loaded from the disk. The speed is relative to the same requests without.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from gpu_sections.models import CONFIGS, make_folder
from harness.engines import cache_folder
from harness.machine import describe_machine
from quire_engine import LLM, AsyncLLM, EngineConfig, LoRARequest, SamplingParams
from quire_engine.adapters.adaptable import adaptable_modules
from quire_engine.models.checkpoints.config import CheckpointConfig
from safetensors.torch import save_file

FIRST_TOKENS, TOKENS = 4, 32
"""Of the two runs, the second has so many more."""
PROMPT_TOKENS = 32
STREAMS, STREAM_TOKENS = 16, 96
READY_BYTES, ZIPF_TOKENS, ZIPF_SLOTS = 2 * 10**9, 16, 8


def make_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Random matrices of all linear layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in shapes.items():
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) * 0.01
        tensors[f"base_model.model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def prompts_of(count: int, vocab_size: int) -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    return [{"prompt_token_ids": [rng.randrange(2, vocab_size) for _ in range(PROMPT_TOKENS)]} for _ in range(count)]


def step_seconds(llm: LLM, prompts: Any, adapters: list[LoRARequest | None] | None) -> float:
    """Time of a decode step of all prompts together."""

    def run(num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        return time.perf_counter() - start

    return (run(FIRST_TOKENS + TOKENS) - run(FIRST_TOKENS)) / TOKENS


async def gaps_while_loading(
    base: Path, settings: dict[str, Any], adapter: Path, vocab_size: int
) -> tuple[float, float]:
    """The median gap between tokens of streams, and the longest while an adapter is loaded, in seconds."""
    engine = AsyncLLM(EngineConfig.from_settings({"model": str(base), **settings}))
    await engine.start()
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    params = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)

    async def stream(number: int, prompt: dict[str, list[int]]) -> None:
        async for _ in engine.generate(prompt, params, f"stream-{number}"):
            arrivals[number].append(time.perf_counter())

    async def load() -> tuple[float, float]:
        while min(map(len, arrivals)) < STREAM_TOKENS // 3:
            await asyncio.sleep(0.01)
        start = time.perf_counter()
        await engine.add_lora(LoRARequest("new", lora_path=str(adapter)))
        one = SamplingParams(temperature=0, max_tokens=1)
        async for _ in engine.generate(prompts[0], one, "asks", lora_request=LoRARequest("new")):
            pass
        return start, time.perf_counter()

    prompts = prompts_of(STREAMS, vocab_size)
    try:
        tasks = [asyncio.create_task(stream(*one)) for one in enumerate(prompts)]
        start, end = await load()
        await asyncio.gather(*tasks)
    finally:
        engine.shutdown()
    gaps = [(b, b - a) for times in arrivals for a, b in pairwise(times)]
    during = [gap for at, gap in gaps if start <= at and at - gap <= end]
    return statistics.median(gap for _, gap in gaps), max(during)


def serve_zipf(
    base: Path, settings: dict[str, Any], parent: Path, count: int, num_requests: int, rank: int
) -> dict[str, float]:
    """Serve requests of so many adapters, and the same without; print what loading them took."""
    checkpoint = CheckpointConfig.from_folder(base)
    shapes = adaptable_modules(checkpoint).shapes
    each = 2 * rank * sum(map(sum, shapes.values()))
    num_ready = min(count, READY_BYTES // each)
    requests = [
        LoRARequest(str(n), lora_path=str(make_adapter(parent / f"adapter-{n}", shapes, rank, n))) for n in range(count)
    ]
    numbers = random.Random(1).choices(range(count), [1 / (n + 1) for n in range(count)], k=num_requests)
    llm = LLM(base, **settings, enable_lora=True, max_loras=ZIPF_SLOTS, max_cpu_loras=num_ready, max_lora_rank=rank)
    prompts = prompts_of(num_requests, checkpoint.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=ZIPF_TOKENS, ignore_eos=True, detokenize=False)
    speeds, num_errors = [], 0
    for adapters in (None, [requests[n] for n in numbers]):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        speeds.append(num_requests * ZIPF_TOKENS / (time.perf_counter() - start))
        num_errors += sum(one.error is not None for one in outputs)
    stats = llm.get_stats().adapters
    llm.shutdown()
    assert stats is not None
    found = {
        "hit_rate": 1 - stats.num_loads / num_requests, "loads": stats.num_loads,
        "loads_per_second": stats.num_loads * speeds[1] / (num_requests * ZIPF_TOKENS),
        "evictions": stats.num_evictions, "failed_loads": stats.num_failed_loads, "errors": num_errors,
        "tokens_per_second": speeds[1], "base_tokens_per_second": speeds[0],
    }  # fmt: skip
    print(f"{count} adapters of {each / 1e6:.1f} MB, {len(set(numbers))} of them asked for by {num_requests} requests; "
          f"{num_ready} ready, {ZIPF_SLOTS} in a step")  # fmt: skip
    for name, value in found.items():
        print(f"  {name}: {value:.3g}")
    return found


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="m400", help="one of checkpoints.py, or a folder")
    parser.add_argument("--dummy", choices=list(CONFIGS), help="a shape without weights, in place of --model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a setting of both engines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--zipf", type=int, help="serve requests of so many adapters")
    parser.add_argument("--requests", type=int, default=400, help="of --zipf")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "max_num_seqs": arguments.rows, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 29,
        **{name: json.loads(value) for name, _, value in (one.partition("=") for one in arguments.set)},
    }  # fmt: skip
    with ExitStack() as stack:
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.dummy:
            base, settings["load_format"] = make_folder(arguments.dummy, parent), "dummy"
        else:
            base = Path(arguments.model)
            if not base.is_dir():
                base = make_checkpoint(arguments.model, cache_folder() / "checkpoints")
        if arguments.zipf:
            print(describe_machine())
            served = serve_zipf(base, settings, parent, arguments.zipf, arguments.requests, arguments.rank)
            if arguments.json:
                arguments.json.write_text(json.dumps(served, indent=1) + "\n")
            return 0
        checkpoint = CheckpointConfig.from_folder(base)
        vocab_size, shapes = checkpoint.vocab_size, adaptable_modules(checkpoint).shapes
        share = (
            arguments.rank * sum(map(sum, shapes.values())) / sum(rows * columns for rows, columns in shapes.values())
        )
        count = max(arguments.adapters)
        folders = [make_adapter(parent / f"adapter-{n}", shapes, arguments.rank, n) for n in range(count + 1)]
        of_adapters = {
            "enable_lora": True, "max_loras": count, "max_cpu_loras": count, "max_lora_rank": arguments.rank,
        }  # fmt: skip
        without, again = LLM(base, **settings), LLM(base, **settings)
        engine = LLM(base, **settings, **of_adapters)
        prompts = prompts_of(arguments.rows, vocab_size)
        requests = [LoRARequest(str(n), lora_path=str(folders[n])) for n in range(count)]
        kinds: dict[str, tuple[LLM, list[LoRARequest | None] | None]] = {
            "an engine without adapters": (without, None), "another one": (again, None),
            "rows of the base": (engine, None),
        }  # fmt: skip
        for number in arguments.adapters:
            name = f"{number} adapters, {number * share:.0%} of the weights' size,"
            kinds[name] = engine, [requests[row % number] for row in range(arguments.rows)]
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for llm, its in kinds.values():
            step_seconds(llm, prompts, its)  # loads them, and warms up
        for number in range(arguments.rounds):
            for name in list(kinds)[:: -1 if number % 2 else 1]:
                seconds[name].append(step_seconds(kinds[name][0], prompts, kinds[name][1]))
        for llm in (without, again, engine):
            llm.shutdown()
        print(describe_machine())
        print(f"{base.name}, {arguments.rows} rows, rank {arguments.rank}, {settings['dtype']}")
        (first, base_seconds), *others = seconds.items()
        print(f"  {first}: {1e3 * statistics.median(base_seconds):.2f} ms for a step")
        ratios = {}
        for name, its_seconds in others:
            ratios[name] = statistics.median(a / b for a, b in zip(base_seconds, its_seconds, strict=True))
            print(f"  {name}: {ratios[name]:.2f} of its speed, {1e3 * statistics.median(its_seconds):.2f} ms")
        median, longest = asyncio.run(gaps_while_loading(base, settings | of_adapters, folders[count], vocab_size))
        print(f"  {STREAMS} streams while another adapter is loaded: longest gap {1e3 * longest:.1f} ms, "
              f"{1e3 * median:.1f} ms in the median of all gaps")  # fmt: skip
        if arguments.json:
            found = {"ratios": ratios, "longest_gap_seconds": longest, "median_gap_seconds": median}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
