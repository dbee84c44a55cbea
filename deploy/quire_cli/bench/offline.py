"""`quire bench latency` and `quire bench throughput`: the engine in this process, with no server."""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_load.datasets import DatasetOptions, PromptMaker, SampleRequest, make_requests
from quire_load.report import percentile

from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError
from quire_cli.generate import loaded_engine
from quire_cli.options import LatencyOptions

if TYPE_CHECKING:
    from quire_engine import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)
"""Those of `vllm bench latency`."""


def bench_latency(
    model: Path, settings: Mapping[str, Any], options: LatencyOptions, *, as_json: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> None:  # fmt: skip
    """How long one batch takes from its prompts to its last token.

    Args:
        model: a checkpoint's folder.
        settings: the engine's, as in `model.json`.
        options: the batch, and how often.
        as_json: one JSON object instead of lines.
        clock: seconds.

    Raises:
        CommandError: the model cannot be loaded, or takes no such batch.
        UsageError: a setting has a bad value.
    """
    with _engine(model, settings) as (llm, prompts), waiting_line(Console(), "measuring", announce=False) as waiting:
        rng = random.Random(0)
        batch = [
            SampleRequest(prompt=prompts.ids(rng, options.input_len), max_tokens=options.output_len)
            for _ in range(options.batch_size)
        ]
        latencies = []
        num_rounds = options.num_iters_warmup + options.num_iters
        for number in range(num_rounds):
            start = clock()
            _generate(llm, batch)
            latencies.append(clock() - start)
            waiting.tick(100 * (number + 1) // num_rounds)
    latencies = latencies[options.num_iters_warmup :]
    percentiles = {str(q): percentile(latencies, q / 100) for q in PERCENTILES}
    mean = statistics.fmean(latencies)
    if as_json:
        print(json.dumps({"avg_latency": mean, "latencies": latencies, "percentiles": percentiles}, indent=2))
        return
    print(f"average latency  {mean:.4f} s, {options.batch_size * options.output_len / mean:.1f} output tokens/s")
    for name, value in percentiles.items():
        print(f"p{name:<15} {value:.4f} s")


def bench_throughput(
    model: Path, settings: Mapping[str, Any], dataset: DatasetOptions, num_prompts: int, *, seed: int, as_json: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> None:  # fmt: skip
    """How many requests and tokens per second there are when all requests come at once.

    Args:
        model: a checkpoint's folder.
        settings: the engine's, as in `model.json`.
        dataset: what is computed.
        num_prompts: requests in all.
        seed: of the dataset.
        as_json: one JSON object instead of lines.
        clock: seconds.

    Raises:
        CommandError: the model cannot be loaded, or takes no such prompts.
        UsageError: a setting has a bad value, or the dataset cannot be made.
    """
    with _engine(model, settings) as (llm, prompts):
        try:
            requests = make_requests(dataset, prompts, num_prompts, seed)
        except ValueError as error:
            raise UsageError(str(error)) from None
        with waiting_line(Console(), f"computing {num_prompts} requests", announce=False):
            _generate(llm, requests[:1])  # what is only computed once is not measured
            llm.reset_prefix_cache()
            start = clock()
            num_input_tokens, num_output_tokens = _generate(llm, requests)
            elapsed = clock() - start
    num_tokens = num_input_tokens + num_output_tokens
    values = {
        "elapsed_time": elapsed, "num_requests": num_prompts, "total_num_tokens": num_tokens,
        "total_output_tokens": num_output_tokens, "requests_per_second": num_prompts / elapsed,
        "tokens_per_second": num_tokens / elapsed, "output_tokens_per_second": num_output_tokens / elapsed,
    }  # fmt: skip
    if as_json:
        print(json.dumps(values, indent=2))
        return
    print(f"throughput  {values['requests_per_second']:.2f} requests/s, {values['tokens_per_second']:.1f} tokens/s, "
          f"{values['output_tokens_per_second']:.1f} output tokens/s")  # fmt: skip
    print(f"tokens      {num_input_tokens} in, {num_output_tokens} out, in {elapsed:.2f} s")


@contextmanager
def _engine(model: Path, settings: Mapping[str, Any]) -> "Iterator[tuple[LLM, PromptMaker]]":
    """The engine, and prompts of its vocabulary. As with vLLM's benchmarks, no prefix is cached unless settings say so:
    the same prompts come again and again.
    """
    from quire_engine.config import EngineConfig
    from quire_engine.errors import EngineError, RequestError

    settings = {"enable_prefix_caching": False, **settings}
    try:
        config = EngineConfig.from_settings({"model": str(model), **settings})
        prompts = PromptMaker(Path(config.model.tokenizer_path))
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        with loaded_engine(model, settings) as llm:
            yield llm, prompts
    except (EngineError, RequestError, ValueError) as error:
        raise CommandError(str(error)) from error


def _generate(llm: "LLM", requests: Sequence[SampleRequest]) -> tuple[int, int]:
    """Compute them all; returns the tokens that went in and came out."""
    from quire_engine.sampling_params import SamplingParams

    outputs = llm.generate(
        [request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
         for request in requests],
        [SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, seed=0, detokenize=False)
         for request in requests],
        use_tqdm=False,
    )  # fmt: skip
    return (
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs),
    )
