"""`quire bench serve`: a load on a server that runs, and what client and server measured of it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire_engine.system.extras import missing_package
from quire_load.arrivals import Arrivals
from quire_load.datasets import (
    DatasetOptions,
    PromptMaker,
    SampleRequest,
    make_requests,
    with_adapters,
    with_slo_classes,
)
from quire_load.printable import printable
from quire_load.report import METRICS, Report, summarize

from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError
from quire_cli.options import BenchOptions

if TYPE_CHECKING:
    from quire_load.endpoint import Endpoint
    from quire_load.load import Load
    from quire_load.scrape import Scrape
    from quire_load.server_figures import ServerFigures

WARM_UP = DatasetOptions(dataset_name="random", random_input_len=64, random_output_len=16)
"""Requests that run before the clock starts, with images where those that are measured have any. They have a seed of
their own, so that no prompt begins like one that is measured, and no image is the same."""
_NEEDS = ("tritonclient", "grpc", "aiohttp", "prometheus_client")
_TICK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a run measured."""

    report: Report
    server: "ServerFigures | None"
    no_server: str
    """Why the server's figures are not there."""
    is_interrupted: bool


def bench_serve(options: BenchOptions, percentiles: Sequence[float], *, as_json: bool) -> int:
    """Run it, and print what was measured, also of a run that Ctrl-C ends early.

    Returns:
        Exit code: 1 if no request was answered, or it was interrupted.

    Raises:
        CommandError: something it needs is missing.
        UsageError: the dataset cannot be made.
    """
    console = Console()
    requests, warm_ups = make_load(options)
    with waiting_line(console, f"{len(requests)} requests to {options.url}", announce=False) as waiting:
        measurement = asyncio.run(measure(options, requests, warm_ups, on_progress=waiting.tick))
    if as_json:
        arrivals = options.arrivals
        arguments = {
            "task": options.task, "backend": options.backend, "model": options.model, "num_prompts": len(requests),
            "request_rate": _number(arrivals.request_rate), "burstiness": _number(arrivals.burstiness),
            "max_concurrency": arrivals.max_concurrency, "is_interrupted": measurement.is_interrupted,
        }  # fmt: skip
        server = measurement.server and measurement.server.as_dict(percentiles)
        print(json.dumps({**arguments, **measurement.report.as_dict(percentiles), "server": server}, indent=2))
    else:
        print("\n".join(map(printable, describe(measurement, percentiles))))
    for kind, message in measurement.report.error_messages.items():
        console.line(f"quire: {measurement.report.errors[kind]} {kind}: {' '.join(message.split())[:300]}")
    if measurement.is_interrupted:
        left = len(requests) - measurement.report.completed - measurement.report.failed
        console.line(f"quire: interrupted; {left} of {len(requests)} requests are not in these figures")
    return int(measurement.is_interrupted or not measurement.report.completed)


def make_load(options: BenchOptions) -> tuple[list[SampleRequest], list[SampleRequest]]:
    """The requests, and those that warm up.

    Raises:
        CommandError: something it needs is missing.
        UsageError: the dataset cannot be made.
    """
    missing = missing_package("bench", *_NEEDS)
    if missing:
        raise CommandError(missing)
    try:
        prompts = PromptMaker(options.tokenizer, as_text=options.backend == "openai-chat")
        requests = make_requests(options.dataset, prompts, options.num_prompts, options.seed)
        warm_up = WARM_UP
        if options.dataset.dataset_name == "random-mm":
            warm_up = replace(options.dataset, random_input_len=64, random_output_len=16)
        warm_ups = make_requests(warm_up, prompts, options.num_warmups, ~options.seed) if options.num_warmups else []
    except ValueError as error:
        raise UsageError(str(error)) from None
    requests = with_slo_classes(requests, options.slo_classes, options.seed)
    return with_adapters(requests, options.adapters, options.seed), warm_ups


async def measure(
    options: BenchOptions, requests: Sequence[SampleRequest], warm_ups: Sequence[SampleRequest], *,
    on_progress: Callable[[int], None] = lambda percent: None,
) -> Measurement:  # fmt: skip
    """Warm up, then measure. Ctrl-C ends it early, with what has been measured so far.

    Raises:
        CommandError: the warm-up failed.
    """
    from quire_load.load import Load
    from quire_load.server_figures import difference

    async with _endpoint(options) as endpoint:
        load = Load(endpoint, requests, options.arrivals, timeout_s=options.request_timeout_s)
        before, after, no_server = None, None, "the run was interrupted"
        with _stopped_by_ctrl_c(load.stop):
            await _warm_up(endpoint, warm_ups, options.request_timeout_s, load)
            if not load.is_interrupted:
                before, no_server = await _read_metrics(options.metrics_endpoint)
            ticking = asyncio.create_task(_tick(lambda: on_progress(100 * len(load.records) // len(requests))))
            await load.run()
            ticking.cancel()
        if before is not None:
            after, no_server = await _read_metrics(options.metrics_endpoint)
    server = difference(before, after, options.model) if before and after else None
    return Measurement(
        report=summarize(load.records, options.goodput), server=server, no_server=no_server,
        is_interrupted=load.is_interrupted,
    )  # fmt: skip


async def _warm_up(endpoint: "Endpoint", requests: Sequence[SampleRequest], timeout_s: float, before: "Load") -> None:
    """Send these at once, and wait for them, or until the run that comes next is stopped.

    Raises:
        CommandError: one failed.
    """
    from quire_load.load import Load

    load = Load(endpoint, requests, Arrivals(), timeout_s=timeout_s)
    running = asyncio.create_task(load.run())
    while not running.done():
        await asyncio.wait([running], timeout=_TICK_S)
        if before.is_interrupted:
            load.stop()
    for record in load.records:
        if record.error_kind:
            raise CommandError(f"the warm-up's request failed: {record.error_kind}: {record.error}")


@asynccontextmanager
async def _endpoint(options: BenchOptions) -> "AsyncIterator[Endpoint]":
    from quire_load import grpc_endpoint, http_endpoint

    endpoint: Endpoint
    if options.backend == "grpc":
        of_grpc = grpc_endpoint.GrpcEmbeddingEndpoint if options.task == "embed" else grpc_endpoint.GrpcEndpoint
        endpoint = of_grpc(options.url, options.model, options.sampling)
    elif options.backend == "generate-stream":
        endpoint = http_endpoint.GenerateStreamEndpoint(options.url, options.model, options.sampling)
    else:
        kind: type[http_endpoint.OpenAIEndpoint | http_endpoint.OpenAIEmbeddingEndpoint] = http_endpoint.OpenAIEndpoint
        if options.task == "embed":
            kind = http_endpoint.OpenAIEmbeddingEndpoint
        elif options.backend == "openai-chat":
            kind = http_endpoint.OpenAIChatEndpoint
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else None
        endpoint = kind(options.url.removesuffix("/v1"), options.model, options.sampling, headers)
    try:
        yield endpoint
    finally:
        await endpoint.close()


class _stopped_by_ctrl_c:  # noqa: N801 (a context manager, used like a function)
    """While it lasts, Ctrl-C calls a function in the event loop instead of ending the program."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        with suppress(ValueError, RuntimeError):  # not in the main thread: there is no Ctrl-C
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop)

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


async def _tick(tick: Callable[[], None]) -> None:
    while True:
        tick()
        await asyncio.sleep(_TICK_S)


async def _read_metrics(endpoint: str) -> "tuple[Scrape | None, str]":
    from quire_load.scrape import ScrapeError
    from quire_load.server_figures import settled

    try:
        return await asyncio.to_thread(settled, endpoint), ""
    except ScrapeError as error:
        return None, str(error)


def describe(measurement: Measurement, percentiles: Sequence[float]) -> list[str]:
    """Lines for people: the client's figures, and the server's beside them."""
    report, server = measurement.report, measurement.server
    values = report.as_dict(percentiles)
    theirs = server.as_dict(percentiles) if server is not None else {}
    throughput = f"{report.rate(report.total_input_tokens):.1f} input tokens/s"
    tokens = f"{report.total_input_tokens} in"
    if report.has_output_tokens:
        throughput = (
            f"{values['output_throughput']:.1f} output tokens/s, {values['total_token_throughput']:.1f} tokens/s in all"
        )
        tokens += f", {report.total_output_tokens} out"
    lines = [
        f"requests               {report.completed} answered, {report.failed} failed"
        + "".join(f", {number} {kind}" for kind, number in report.errors.items()),
        f"duration               {report.duration:.2f} s",
        f"throughput             {values['request_throughput']:.2f} requests/s, {throughput}",
        f"tokens                 {tokens}",
        f"sent after their time  {report.max_lateness_ms:.1f} ms at most",
    ]
    for one in report.goodput:
        name = f" {one.slo_class}" if one.slo_class else ""
        of_server = server.verdicts.get(one.slo_class or "default") if server is not None else None
        said = f"; by the server's targets {of_server['good']} of {sum(of_server.values())}" if of_server else ""
        lines.append(
            f"goodput{name:<15} {one.request_goodput:.2f} requests/s, {one.num_good} of {one.num_requests}{said}"
        )
    columns = ["mean", "median", *(f"p{q:g}" for q in percentiles)]
    lines += ["", f"{'ms':<30}" + "".join(f"{column:>10}" for column in columns)]
    for name in report.times_ms:
        for whose, of in ((METRICS[name], values), ("  by the server", theirs)):
            if of:
                cells = [of[f"{column}_{name}_ms"] for column in columns]
                lines.append(
                    f"{whose:<30}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>10}" for cell in cells)
                )
    if server is None:
        lines += ["", f"The server's own figures are not here: {measurement.no_server}"]
    return lines


def parse_weights(option: str, items: Sequence[str]) -> dict[str, float]:
    """The values of an option that is given as `NAME` or `NAME:WEIGHT`.

    Raises:
        ValueError: an item is not of that form.
    """
    found = {}
    for item in items:
        name, _, weight = item.partition(":")
        try:
            found[name] = float(weight or 1)
        except ValueError:
            found[name] = 0.0
        if not name or not 0 < found[name] < float("inf"):
            raise ValueError(f"{option} is {item!r}; it must be NAME or NAME:WEIGHT with a weight above 0")
    return found


def _number(value: float) -> float | str:
    """JSON knows no infinity."""
    return value if value < float("inf") else "inf"
