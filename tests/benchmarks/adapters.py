"""What LoRA adapters cost: the decode step of a batch whose requests have different ones, next to the base alone; and
the longest gap of streams while others are loaded.

    python tests/benchmarks/adapters.py [--model m400 | --dummy 1B] [--rows 32] [--adapters 1 8 32] [--rank 16]
                                        [--targets all-linear q_proj,v_proj] [--rounds 5] [--set NAME=JSON] [--vllm]
                                        [--json FILE] [--zipf 200 [--requests 400]]

Three engines in one process take turns, every other round in reverse: two that serve no adapters, and one that does,
whose batch then has no adapter, or 1, 8, 32 different ones. A ratio is the speed relative to the first; that of the
second is what the machine's noise makes of 1. A step of few rows waits for memory, so a line also says how large the
matrices of the adapters are, relative to the model's linear layers. A step's time is the difference between two runs of
the same prompts, one of a few tokens and one of more. On a GPU, take a dummy: its weights are not read.

--targets are the layers that the adapters change, one measurement for each: all linear ones, or those of these names
(PEFT's default for Llamas is q_proj,v_proj). --vllm runs the same adapters with vLLM's CPU build (peers/setup.sh vllm),
with an engine that serves adapters and one that does not.

Then streams run while adapters are loaded, one after another: the longest gap between two tokens while the folder is
read, and while the ranks load it; beside that the longest of as many steps while nothing happens. Then the longest gap
around its first request, which puts it into a slot; beside that around requests that do not. Each has a prompt in one
of the steps, which takes longer.

With --zipf, it serves requests of so many adapters instead, the n-th with a probability in proportion to 1/n. Those
that are ready take 2 GB at most, others are loaded from the disk. The speed is relative to the same requests without.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from gpu_sections.models import CONFIGS, make_folder
from harness.engines import SCRIPTS, cache_folder, environment_of, find_peer
from harness.machine import describe_machine
from quire_engine import LLM, AsyncLLM, EngineConfig, LoRARequest, SamplingParams
from quire_engine.adapters.adaptable import adaptable_modules
from quire_engine.models.checkpoints.config import CheckpointConfig
from safetensors.torch import save_file

FIRST_TOKENS, TOKENS = 4, 32
"""Of the two runs, the second has so many more."""
PROMPT_TOKENS = 32
STREAMS, STREAM_TOKENS = 16, 400
LOADS = 4
"""Adapters that are loaded beside the streams; the first one is not counted."""
QUIET_STEPS = 10
"""About as many as a load takes."""
READY_BYTES, ZIPF_TOKENS, ZIPF_SLOTS = 2 * 10**9, 16, 8


def make_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Random matrices of these layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in shapes.items():
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) * 0.01
        tensors[f"base_model.model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir()
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
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
        llm.reset_prefix_cache()  # else the first run alone computes the prompts, where others have evicted them
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        return time.perf_counter() - start

    return (run(FIRST_TOKENS + TOKENS) - run(FIRST_TOKENS)) / TOKENS


async def gaps_while_loading(
    base: Path, settings: dict[str, Any], adapters: list[Path], vocab_size: int
) -> dict[str, list[float]]:
    """By what happens beside the streams, the longest gap between their tokens in seconds, for each adapter but the
    first; of "median" that of all gaps."""
    engine = AsyncLLM(EngineConfig.from_settings({"model": str(base), **settings}))
    await engine.start()
    gc.freeze()  # as servers do: a full collection would walk all that was imported
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    windows: list[tuple[str, float, float]] = []
    params = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    prompts = prompts_of(STREAMS + 3 * len(adapters), vocab_size)

    async def stream(number: int) -> None:
        async for _ in engine.generate(prompts[number], params, f"stream-{number}"):
            arrivals[number].append(time.perf_counter())

    async def ask(lora_request: LoRARequest | None) -> None:
        async for _ in engine.generate(
            prompts.pop(),
            SamplingParams(temperature=0, max_tokens=1),
            f"asks-{len(prompts)}",
            lora_request=lora_request,
        ):
            pass

    async def steps(number: int) -> None:
        until = min(map(len, arrivals)) + number
        while min(map(len, arrivals)) < until:
            await asyncio.sleep(0.005)

    async def loaded(new: LoRARequest) -> None:
        await engine.pin_lora(new.lora_name)
        while not any(one.name == new.lora_name and one.state == "ready" for one in await engine.list_loras()):
            await asyncio.sleep(0.02)

    async def timed(name: str, what: Awaitable[object]) -> None:
        await steps(4)
        start = time.perf_counter()
        await what
        windows.append((name, start, time.perf_counter()))

    try:
        tasks = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        for number, folder in enumerate(adapters):
            new = LoRARequest(f"new-{number}", lora_path=str(folder))
            await timed("nothing happens", steps(QUIET_STEPS))
            await timed("its folder is read", engine.add_lora(new))
            await timed("the ranks load it", loaded(new))
            await timed("its first request", ask(new))
            await timed("another request with it", ask(new))
            await timed("a request of the base", ask(None))
        assert not any(task.done() for task in tasks), "the streams have ended; raise STREAM_TOKENS"
        for task in tasks:
            task.cancel()
    finally:
        engine.shutdown()
    gaps = [(b, b - a) for times in arrivals for a, b in pairwise(times)]
    found: dict[str, list[float]] = {"median": [statistics.median(gap for _, gap in gaps)]}
    for name, start, end in windows[len(windows) // len(adapters) :]:
        longest = max(gap for at, gap in gaps if start <= at and at - gap <= end)
        found.setdefault(name, []).append(longest)
    return found


def vllm_seconds(
    base: Path, folders: list[Path], parent: Path, arguments: argparse.Namespace, prompts: Any
) -> dict[str, list[float]]:
    """Times of a step with vLLM, by the number of adapters; "none" is an engine that serves none."""
    peers = Path(os.environ.get("QUIRE_BENCH_PEERS") or cache_folder() / "peers")
    if reason := find_peer(peers, "vllm"):
        raise SystemExit(reason)
    found: dict[str, list[float]] = {}
    of_adapters = {"enable_lora": True, "max_loras": len(folders), "max_cpu_loras": len(folders),
                   "max_lora_rank": arguments.rank}  # fmt: skip
    for settings, adapters in (({}, [0]), (of_adapters, [0, *arguments.adapters])):
        job = parent / "vllm.json"
        job.write_text(json.dumps({
            "model": str(base), "settings": settings, "threads": len(os.sched_getaffinity(0)),
            "prompts": [one["prompt_token_ids"] for one in prompts], "folders": list(map(str, folders)),
            "adapters": adapters, "lengths": [FIRST_TOKENS, FIRST_TOKENS + TOKENS], "rounds": arguments.rounds,
        }))  # fmt: skip
        subprocess.run(
            [peers / "vllm" / "bin" / "python", SCRIPTS / "vllm_adapters.py", job], check=True, stdout=sys.stderr,
            env=environment_of("vllm", peers),
        )  # fmt: skip
        seconds = json.loads(job.read_text())["seconds"]
        found |= seconds if settings else {"none": seconds["0"]}
    return found


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


def measure(
    base: Path, settings: dict[str, Any], parent: Path, targets: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Print, and return, what adapters of some layers cost."""
    checkpoint = CheckpointConfig.from_folder(base)
    whole = adaptable_modules(checkpoint).shapes
    shapes = {
        name: shape
        for name, shape in whole.items()
        if targets == "all-linear" or name.rpartition(".")[2] in targets.split(",")
    }
    if not shapes:
        raise SystemExit(f"--targets: {base.name} has no linear layers named {targets}")
    share = arguments.rank * sum(map(sum, shapes.values())) / sum(rows * columns for rows, columns in whole.values())
    count = max(arguments.adapters)
    folders = [make_adapter(parent / str(n), shapes, arguments.rank, n) for n in range(count + LOADS)]
    of_adapters = {
        "enable_lora": True, "max_loras": count, "max_cpu_loras": count, "max_lora_rank": arguments.rank,
    }  # fmt: skip
    without, again = LLM(base, **settings), LLM(base, **settings)
    engine = LLM(base, **settings, **of_adapters)
    prompts = prompts_of(arguments.rows, checkpoint.vocab_size)
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
    for turn in range(arguments.rounds):
        for name in list(kinds)[:: -1 if turn % 2 else 1]:
            seconds[name].append(step_seconds(kinds[name][0], prompts, kinds[name][1]))
    for llm in (without, again, engine):
        llm.shutdown()
    print(f"adapters of {targets}")
    found: dict[str, Any] = {"ratios": print_speeds("", seconds, arguments.rows)}
    if arguments.vllm:
        theirs = vllm_seconds(base, folders[:count], parent, arguments, prompts)
        found["vllm_ratios"] = print_speeds("vLLM, adapters: ", theirs, arguments.rows)
    settings = settings | of_adapters | {
        "max_num_seqs": max(arguments.rows, STREAMS + 1), "max_model_len": 512, "max_cpu_loras": max(count, LOADS + 1),
    }  # fmt: skip
    found["longest_gaps"] = asyncio.run(gaps_while_loading(base, settings, folders[count:], checkpoint.vocab_size))
    for name, gaps in found["longest_gaps"].items():
        each = ", ".join(f"{1e3 * gap:.1f}" for gap in sorted(gaps))
        print(f"  {STREAMS} streams, {name if name == 'median' else f'longest: {name}'}: {each} ms")
    return found


def print_speeds(prefix: str, seconds: dict[str, list[float]], rows: int) -> dict[str, float]:
    """Print the times of steps, and return the speeds relative to the first."""
    first, ratios = next(iter(seconds.values())), {}
    for name, its_seconds in seconds.items():
        ratios[name] = statistics.median(a / b for a, b in zip(first, its_seconds, strict=True))
        step = statistics.median(its_seconds)
        print(f"  {prefix}{name}: {ratios[name]:.2f} of the first one's speed, {1e3 * step:.2f} ms, "
              f"{rows / step:.0f} tokens/s")  # fmt: skip
    return ratios


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="m400", help="one of checkpoints.py, or a folder")
    parser.add_argument("--dummy", choices=list(CONFIGS), help="a shape without weights, in place of --model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=["all-linear"], help="layers that the adapters change")
    parser.add_argument("--vllm", action="store_true", help="run them with vLLM's CPU build, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a setting of both engines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--zipf", type=int, help="serve requests of so many adapters")
    parser.add_argument("--requests", type=int, default=400, help="of --zipf")
    arguments = parser.parse_args()
    if arguments.vllm and arguments.dummy:
        parser.error("--vllm reads weights; give --model")
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
        print(describe_machine())
        found: dict[str, Any] = {}
        if arguments.zipf:
            found = serve_zipf(base, settings, parent, arguments.zipf, arguments.requests, arguments.rank)
        else:
            print(f"{base.name}, {arguments.rows} rows, rank {arguments.rank}, {settings['dtype']}")
            for targets in arguments.targets:
                (parent / targets).mkdir()
                found[targets] = measure(base, settings, parent / targets, targets, arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
