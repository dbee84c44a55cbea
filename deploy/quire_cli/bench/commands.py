"""The commands of `quire bench`, whose options have the names of `vllm bench`, and `quire tune`, which uses them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from quire_load.datasets import DatasetOptions

from quire_cli.errors import UsageError
from quire_cli.options import (
    AsJson,
    BenchOptions,
    Checkpoint,
    LatencyOptions,
    Settings,
    TuneOptions,
    usage_errors,
    with_options,
)

bench_app = typer.Typer(help="Measure a server under load, or an engine without one.", rich_markup_mode=None)


@bench_app.command("serve")
@with_options
def serve(
    options: BenchOptions,
    ignore_eos: Annotated[bool, "Answers have just the length that is asked for."] = True,
    extra_body: Annotated[str, ("JSON", "Further sampling parameters, or those of embed.")] = "{}",
    slo_class: Annotated[list[str] | None, ("NAME[:WEIGHT]", "SLO class of requests; repeat for a mixture.")] = None,
    lora: Annotated[list[str] | None, ("NAME[:WEIGHT]", "LoRA adapter of requests; repeat for a mixture.")] = None,
    goodput: Annotated[
        list[str] | None,
        ("[CLASS=]KEY:MS,...", "What is good: ttft, tpot, e2el in ms; may be repeated."),
    ] = None,
    metric_percentiles: Annotated[str, "Which percentiles, with commas between."] = "90,95,99",
    as_json: AsJson = False,
) -> int:
    """Send a load to a server that runs, and measure it as its clients see it, and as the server does.

    Times run from when a request was due, not from when it was sent. The options have vllm bench serve's names. Ctrl-C
    prints what has been measured so far. OPENAI_API_KEY is sent to OpenAI's endpoints.

    Example: quire bench serve --model tinypy --request-rate 20 --goodput ttft:200,tpot:20
    """
    from quire_load.report import parse_goodput

    from quire_cli.bench.serve import bench_serve, parse_weights

    sampling = {"ignore_eos": True} if ignore_eos and options.task != "embed" else {}
    with usage_errors():
        options = replace(
            options, sampling={**sampling, **_json_object("--extra-body", extra_body)},
            slo_classes=parse_weights("slo_class", slo_class or ()), adapters=parse_weights("lora", lora or ()),
            goodput=parse_goodput(goodput or ()),
        )  # fmt: skip
    return bench_serve(options, _percentiles(metric_percentiles), as_json=as_json)


@bench_app.command("latency")
@with_options
def latency(
    model: Checkpoint,
    options: LatencyOptions,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure how long one batch takes, with no server.

    The options have vllm bench latency's names. No prefix is cached, unless enable_prefix_caching=true says so.
    """
    from quire_cli.bench.offline import bench_latency
    from quire_cli.demo import resolve_model
    from quire_cli.model_repository import parse_settings

    bench_latency(resolve_model(model), parse_settings(settings or []), options, as_json=as_json)


@bench_app.command("throughput")
@with_options
def throughput(
    model: Checkpoint,
    settings: Settings = None,
    num_prompts: Annotated[int, "Requests, which come all at once."] = 100,
    dataset_name: Annotated[str, "mixed, random, sharegpt, …: see quire bench serve."] = "mixed",
    dataset_path: Annotated[Path | None, ("FILE", "Of sharegpt.")] = None,
    input_len: Annotated[int, "Of random: tokens per prompt."] = 1024,
    output_len: Annotated[int, "Of random: tokens per answer."] = 128,
    seed: Annotated[int, "Of prompts and lengths."] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure requests and tokens per second when all requests come at once, with no server.

    The options have vllm bench throughput's names. No prefix is cached, unless enable_prefix_caching=true says so.
    """
    from quire_cli.bench.offline import bench_throughput
    from quire_cli.demo import resolve_model
    from quire_cli.model_repository import parse_settings

    with usage_errors():
        dataset = DatasetOptions(dataset_name=dataset_name, dataset_path=dataset_path, random_input_len=input_len,
                                 random_output_len=output_len)  # fmt: skip
    bench_throughput(
        resolve_model(model), parse_settings(settings or []), dataset, num_prompts, seed=seed, as_json=as_json
    )


def tune(options: TuneOptions, as_json: AsJson = False) -> int:
    """Find the settings that meet objectives at the highest rate of requests.

    Each setting's values are tried beside the best ones so far, on a server of their own, whose highest rate is found
    by doubling and bisection. Without --try these are max_num_seqs, max_num_batched_tokens,
    long_prefill_token_threshold, speculative_config, quantization and tensor_parallel_size. KEY=VALUE are settings that
    stay.

    Example: quire tune --model ./Llama-3.2-1B --slo ttft:500,tpot:50 --try 'max_num_seqs=[16,128]' dtype=bfloat16
    """
    from quire_cli.bench.tune import tune as run_tune
    from quire_cli.demo import resolve_model

    return run_tune(replace(options, model=resolve_model(options.model)), as_json=as_json)


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 < value <= 100 for value in values):
        raise UsageError(f"--metric-percentiles is {text!r}; it must be numbers above 0 and up to 100, as in 50,99")
    return values


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{option} is {text[:80]!r}; it must be a JSON object")
    return value
