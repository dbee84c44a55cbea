"""How the time of a step grows with the batch and the context, and how far it is from what the machine could do.

    python tests/benchmarks/cost_growth.py [--model m400] [--batches 1 4 16 64] [--contexts 128 2048 8192] [--steps 9]

Steps of the worker alone, one new token for each request, sampled greedily: median milliseconds, and in brackets the
roofline's time as a percentage of it (harness/roofline.py; bandwidth and peak are measured first, with torch). The KV
cache is filled with noise first: an untouched page is a page of zeros that all share, and in the processor's cache.
What needs a larger KV cache than --kv-gib, or more than half of the free memory, is left out ("-").
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from checkpoints import SHAPES, make_checkpoint
from harness.checkpoint_size import kv_bytes_per_token
from harness.engines import cache_folder
from harness.machine import describe_machine
from harness.roofline import Ceilings, ModelShape, decode_roofline_seconds, measure_ceilings
from quire_engine.config import EngineConfig
from quire_engine.messages import CachedRequestData, NewRequestData, SchedulerOutput
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.options import MLPOptions
from quire_engine.sampling_params import SamplingParams
from quire_engine.system.memory import available_memory_bytes
from quire_engine.worker import Worker
from quire_kernels import cpu

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
WARM_UP_STEPS = 2


class Steps:
    """A worker with a full KV cache, and steps for it.

    Args:
        settings: of the engine, as in `model.json`.
        kv_cache_tokens: size of the KV cache.
    """

    def __init__(self, settings: dict[str, object], kv_cache_tokens: int) -> None:
        self.config = EngineConfig.from_settings(settings)
        self.checkpoint = CheckpointConfig.from_folder(Path(self.config.model.model))
        assert self.config.model.max_model_len is not None
        self.worker = Worker(self.config, self.checkpoint, self.config.model.max_model_len)
        self.worker.initialize_cache(-(-kv_cache_tokens // self.config.cache.block_size))
        for pair in self.worker.runner.kv_caches:
            for cache in pair:
                _fill(cache)

    def seconds(self, batch: int, context: int, num_steps: int) -> float:
        """Median time of a step in which each of `batch` requests reaches about `context` tokens."""
        block_size, num_steps = self.config.cache.block_size, num_steps + WARM_UP_STEPS
        start = context - num_steps
        blocks_each = -(-context // block_size)
        params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True, seed=0)
        requests = [
            NewRequestData(
                request_id=str(i),
                token_ids=[7] * start,
                num_prompt_tokens=start,
                sampling_params=params,
                stop_token_ids=[],
                block_ids=list(range(i * blocks_each, (i + 1) * blocks_each)),
                num_computed_tokens=start - 1,
            )
            for i in range(batch)
        ]
        ids = [request.request_id for request in requests]
        scheduled = dict.fromkeys(ids, 1)
        self.worker.execute_model(SchedulerOutput(scheduled, new_requests=requests))
        times = []
        for step in range(1, num_steps):
            known = CachedRequestData(ids, [[]] * batch, [start - 1 + step] * batch)
            began_at = time.perf_counter()
            self.worker.execute_model(SchedulerOutput(scheduled, cached_requests=known))
            times.append(time.perf_counter() - began_at)
        self.worker.execute_model(SchedulerOutput({}, dropped_request_ids=ids))
        return statistics.median(times[WARM_UP_STEPS:])


def _fill(cache: torch.Tensor) -> None:
    """Small noise, the same in every block."""
    if cache.is_floating_point():
        cache.copy_(torch.randn(cache.shape[1:]).mul_(0.1).to(cache.dtype).expand_as(cache))
    else:
        cache.fill_(1)


def model_shape(checkpoint: CheckpointConfig, model: Path, int8: bool) -> ModelShape:
    """From the checkpoint's configuration."""
    hidden = checkpoint.hidden_size
    heads = (2 * checkpoint.num_heads + 2 * checkpoint.num_kv_heads) * checkpoint.head_size
    mlp = checkpoint.options.layers[0].mlp
    assert isinstance(mlp, MLPOptions), "a dense model"
    layer = hidden * heads + 3 * hidden * mlp.intermediate_size
    return ModelShape(
        linear_parameters=checkpoint.num_layers * layer + checkpoint.vocab_size * hidden,
        num_layers=checkpoint.num_layers,
        num_heads=checkpoint.num_heads,
        head_size=checkpoint.head_size,
        kv_bytes_per_token=kv_bytes_per_token(model),
        weight_dtype_bytes=1 if int8 else 2,
    )


def with_long_context(model: Path, folder: Path, max_positions: int) -> Path:
    """The same checkpoint, but for how long a context it says that it takes: random weights know no difference."""
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_positions}))
    return folder


def print_table(
    steps: Steps, shape: ModelShape, ceilings: Ceilings, kv_bytes: int, arguments: argparse.Namespace
) -> None:
    """Row by row, as it comes."""
    width = 15
    print("batch \\ context" + "".join(f"{context:>{width},}" for context in arguments.contexts))
    for batch in arguments.batches:
        print(f"{batch:15}", end="", flush=True)
        for context in arguments.contexts:
            if batch * context * shape.kv_bytes_per_token > kv_bytes:
                print(f"{'-':>{width}}", end="")
                continue
            seconds = steps.seconds(batch, context, arguments.steps)
            share = 100 * decode_roofline_seconds(shape, ceilings, batch, context) / seconds
            print(f"{f'{1e3 * seconds:.1f} ({share:.0f}%)':>{width}}", end="", flush=True)
        print()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="m400")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--kv-gib", type=float, default=6.0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a further setting")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of checkpoints ($QUIRE_BENCH_CACHE)")
    arguments = parser.parse_args()
    model = make_checkpoint(arguments.model, arguments.cache / "checkpoints")
    kv_bytes = min(int(arguments.kv_gib * 2**30), available_memory_bytes() // 2)
    max_model_len = max(arguments.contexts)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model": str(with_long_context(model, Path(folder), max_model_len)),
            "dtype": "bfloat16",
            "max_model_len": max_model_len,
            "max_num_seqs": max(arguments.batches),
            **{name: json.loads(value) for name, _, value in (item.partition("=") for item in arguments.set)},
        }
        int8 = settings.get("quantization") == "int8"
        ceilings = measure_ceilings(int8)  # by torch, with all of its threads: before the engine takes them
        needed = max(arguments.batches) * max_model_len
        steps = Steps(settings, min(kv_bytes // kv_bytes_per_token(model), needed))
    machine = describe_machine()
    print(f"{arguments.model}, {machine['processor']}, {cpu.get_num_threads()} threads, {machine['date']}")
    bandwidth, peak = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e9
    print(f"ceilings: {bandwidth:.1f} GB/s read, {peak:.0f} GFLOP/s in {'int8' if int8 else 'bf16'}")
    print("milliseconds per step (roofline's share of it)")
    print_table(steps, model_shape(steps.checkpoint, model, int8), ceilings, kv_bytes, arguments)


if __name__ == "__main__":
    main()
