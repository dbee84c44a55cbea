"""Sections on the engine: decode steps against their floor, what graphs and scheduling ahead gain, and throughput next
to transformers. The models are dummies."""

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cost_growth import model_shape
from harness.checkpoint_size import kv_bytes_per_token
from harness.roofline import decode_roofline_seconds
from quire_engine import LLM, SamplingParams
from quire_engine.models.checkpoints.config import CheckpointConfig

from .bench import Bench
from .figures import Figure, at_least, at_most
from .models import CONFIGS, make_folder

__all__ = ["measure_steps", "measure_switches", "measure_throughput"]

STEP_BAR, STEP_AIM = at_most(1.5), at_most(1.25)
"""Times the floor."""
THROUGHPUT_BAR = at_least(3)
"""Times transformers."""
CONTEXT = 512
FIRST_STEPS, STEPS, TRIALS = 4, 48, 3
"""A step's time is the difference between two runs of the same prompts, from the prefix cache: one of `FIRST_STEPS`,
one of `STEPS` more."""


@contextmanager
def engine(model: Path, *, max_num_seqs: int, tokens_each: int, **settings: Any) -> Iterator[LLM]:
    """An LLM with room for so many requests of so many tokens."""
    gc.collect()  # the one before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    block_size = 16
    tokens = max_num_seqs * (-(-tokens_each // block_size) + 1) * block_size
    llm = LLM(
        model, load_format="dummy", dtype="bfloat16", max_model_len=tokens_each, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192, block_size=block_size,
        kv_cache_memory_bytes=tokens * kv_bytes_per_token(model), **settings,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.shutdown()


def prompts_of(name: str, count: int, length: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Random token ids."""
    rng = random.Random(seed)
    vocab_size = CONFIGS[name]["vocab_size"]
    return [{"prompt_token_ids": [rng.randrange(2, vocab_size) for _ in range(length)]} for _ in range(count)]


def run_seconds(llm: LLM, prompts: list[dict[str, list[int]]], num_tokens: int, top_p: float | None = None) -> float:
    """Of a generation of so many tokens for each prompt, without text: greedy, or drawn from the top p."""
    drawn = {"temperature": 0} if top_p is None else {"temperature": 1, "top_p": top_p, "seed": 0}
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **drawn)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    if any(len(output.outputs[0].token_ids) != num_tokens for output in outputs):
        raise RuntimeError(f"an output has not the {num_tokens} tokens that it was to have")
    return seconds


def step_seconds(bench: Bench, llm: LLM, name: str, batch: int, context: int, top_p: float | None = None) -> float:
    """Median time of a decode step of `batch` requests, all with about `context` tokens; all that a user waits for."""
    steps = 4 if bench.is_smoke else STEPS
    prompts = prompts_of(name, batch, context - FIRST_STEPS - steps // 2)
    run_seconds(llm, prompts, FIRST_STEPS + steps, top_p)
    differences = [
        run_seconds(llm, prompts, FIRST_STEPS + steps, top_p) - run_seconds(llm, prompts, FIRST_STEPS, top_p)
        for _ in range(1 if bench.is_smoke else TRIALS)
    ]
    return statistics.median(differences) / steps


def measure_steps(bench: Bench) -> Iterator[Figure]:
    """A decode step, by the time that reading the weights and the KV cache once takes."""
    names, batches = (["tiny"], [1, 2]) if bench.is_smoke else (["1B", "8B"], [1, 16, 64, 256])
    context = 64 if bench.is_smoke else CONTEXT
    with tempfile.TemporaryDirectory() as parent:
        for name in names:
            folder = make_folder(name, Path(parent))
            shape = model_shape(CheckpointConfig.from_folder(folder), folder, int8=False)
            with engine(folder, max_num_seqs=max(batches), tokens_each=2 * context) as llm:
                for batch in batches:
                    seconds = step_seconds(bench, llm, name, batch, context)
                    num_bytes = shape.linear_parameters * 2 + batch * context * shape.kv_bytes_per_token
                    floor = num_bytes / bench.machine.read_bytes_per_second
                    roofline = decode_roofline_seconds(shape, bench.machine.ceilings, batch, context)
                    yield Figure(
                        name=f"{name}, batch {batch}, {context} tokens of context: floor = 1",
                        value=seconds / floor,
                        unit="x",
                        note=f"{1e3 * seconds:.2f} ms; to read {num_bytes / 1e9:.2f} GB takes {1e3 * floor:.2f}, to "
                        f"compute as well {1e3 * roofline:.2f}",
                        bar=STEP_BAR,
                        aim=STEP_AIM,
                    )


def measure_switches(bench: Bench) -> Iterator[Figure]:
    """Steps with CUDA graphs and without, scheduled one ahead and not; and greedy ones next to such with top-p."""
    name, batches = ("tiny", [1, 2]) if bench.is_smoke else ("1B", [1, 16, 64])
    context = 64 if bench.is_smoke else CONTEXT
    kinds = {
        "both": {"enforce_eager": False, "async_scheduling": True},
        "no graphs": {"enforce_eager": True, "async_scheduling": True},
        "not ahead": {"enforce_eager": False, "async_scheduling": False},
    }
    with tempfile.TemporaryDirectory() as parent:
        folder = make_folder(name, Path(parent))
        seconds: dict[str, list[float]] = {}
        for kind, settings in kinds.items():
            with engine(folder, max_num_seqs=max(batches), tokens_each=2 * context, **settings) as llm:
                seconds[kind] = [step_seconds(bench, llm, name, batch, context) for batch in batches]
        largest = 2 if bench.is_smoke else 256
        with engine(folder, max_num_seqs=largest, tokens_each=2 * context) as llm:
            for batch in (1, largest):
                greedy, drawn = (step_seconds(bench, llm, name, batch, context, top_p) for top_p in (None, 0.9))
                note = f"{1e3 * drawn:.2f} ms, {1e3 * greedy:.2f} greedy"
                yield Figure(
                    name=f"{name}, batch {batch}, top-p 0.9: greedy = 1", value=drawn / greedy, unit="x", note=note
                )
    for without, what in (("no graphs", "CUDA graphs"), ("not ahead", "scheduling one step ahead")):
        for batch, best, other in zip(batches, seconds["both"], seconds[without], strict=True):
            note = f"{1e3 * other:.2f} ms without, {1e3 * best:.2f} with"
            yield Figure(name=f"{name}, batch {batch}: gain of {what}", value=other / best, unit="x", note=note)


def measure_throughput(bench: Bench) -> Iterator[Figure]:
    """Offline, the same requests for both engines in turn; prefix caching is off in both."""
    name, count, length, num_tokens = ("tiny", 3, 20, 4) if bench.is_smoke else ("1B", 256, 256, 128)
    prompts = prompts_of(name, count, length)
    with tempfile.TemporaryDirectory() as parent:
        folder = make_folder(name, Path(parent))
        settings = {"enable_prefix_caching": False}
        with engine(folder, max_num_seqs=count, tokens_each=length + num_tokens, **settings) as llm:
            run_seconds(llm, prompts, num_tokens)
            ours = count * num_tokens / min(run_seconds(llm, prompts, num_tokens) for _ in range(2))
    what = f"{name}, {count} requests of {length} tokens in and {num_tokens} out"
    yield Figure(name=what, value=ours, unit="tokens/s")
    gc.collect()
    theirs = _transformers_rate(bench, CONFIGS[name], prompts, num_tokens)
    yield Figure(
        name=f"{what}: transformers", value=theirs, unit="tokens/s", note="continuous batching, paged attention"
    )
    yield Figure(name=f"{what}: transformers = 1", value=ours / theirs, unit="x", bar=THROUGHPUT_BAR)


def _transformers_rate(
    bench: Bench, config: Mapping[str, Any], prompts: list[dict[str, list[int]]], num_tokens: int
) -> float:
    """Output tokens per second of its continuous batching, with all that it chooses itself."""
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    transformers.logging.set_verbosity_error()
    with bench.device:
        model = AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    # On the CPU it cannot see how much memory there is for it.
    sizes = {} if bench.device.type == "cuda" else {"num_blocks": 16, "max_batch_tokens": 256}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
        ),
        continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False, **sizes),
    )
    manager.warmup()
    manager.start()
    try:
        seconds = [_generate_there(manager, prompts, num_tokens) for _ in range(2 if bench.is_smoke else 3)]
    finally:
        manager.stop(block=True)
    return len(prompts) * num_tokens / min(seconds[1:])  # in the first it sizes what it keeps


def _generate_there(manager: Any, prompts: list[dict[str, list[int]]], num_tokens: int) -> float:
    start = time.perf_counter()
    manager.add_requests([prompt["prompt_token_ids"] for prompt in prompts], max_new_tokens=num_tokens)
    made = []
    while len(made) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            made.append(len(result.generated_tokens))
        elif result is None and not manager.is_running():
            raise RuntimeError("the thread of transformers' continuous batching has ended")
    if made != [num_tokens] * len(prompts):
        raise RuntimeError(f"transformers made {sum(made)} tokens of {len(prompts) * num_tokens}")
    return time.perf_counter() - start
