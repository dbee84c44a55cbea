"""`quire tune`: serves a model with one setting after the other, loads it, and says which bear the highest rate."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire_load.arrivals import Arrivals
from quire_load.printable import printable

from quire_cli import process
from quire_cli.bench.serve import Measurement, make_load, measure
from quire_cli.bench.tune_journal import Journal
from quire_cli.bench.tuning import Trial, TrialError, search
from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError
from quire_cli.model_repository import write_model
from quire_cli.options import BenchOptions, TuneOptions

NAME = "tuned"
_READY = re.compile(r"quire: ready grpc=(\S+) http=\S+ metrics=(\S+)")
_LOWEST_PROMPTS, _MOST_PROMPTS = 20, 5000
"""Bounds of the requests of a run: a share of fewer says little."""
_STOP_S = 60.0


def tune(options: TuneOptions, *, as_json: bool) -> int:
    """Search, and print what was found. The journal has each run; the same command goes on from there.

    Returns:
        Exit code: 1 if no settings meet the objectives.

    Raises:
        CommandError: something it needs is missing, or was interrupted.
        UsageError: the journal is of another search, or the dataset cannot be made.
    """
    make_load(_bench(options, options.start_rate, "x:1", "x:1"))  # what is wrong with the dataset is said at once
    journal = Journal(options.journal, options.as_dict())
    console = Console()
    if journal.num_known:
        console.line(f"quire: {journal.num_known} runs are in {options.journal} already")
    with _Runner(options, journal, console) as runner:
        trials = search(options.space, runner.meets, start=options.start_rate, precision=options.precision,
                        on_trial=lambda trial: console.line(f"quire: {_describe(trial)}"))  # fmt: skip
    best = next((trial for trial in reversed(trials) if trial.is_best), None)
    if as_json:
        found = {
            "rate": best.rate if best else 0.0,
            "settings": {**options.fixed, **best.settings} if best else None,
        }
        print(json.dumps({**found, "trials": [asdict(trial) for trial in trials]}, indent=2))
    else:
        print("\n".join(_report(options, trials, best)))
    return 0 if best else 1


class _Runner:
    """Runs that are not in the journal, on a server that stays for as long as its settings do."""

    def __init__(self, options: TuneOptions, journal: Journal, console: Console) -> None:
        self._options = options
        self._journal = journal
        self._console = console
        self._served: Mapping[str, Any] | None = None
        self._endpoints = ("", "")
        self._stack = ExitStack()

    def __enter__(self) -> "_Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def meets(self, settings: Mapping[str, Any], rate: float) -> bool:
        """Whether enough requests meet the targets at that rate.

        Raises:
            TrialError: the model cannot be served with these settings.
            CommandError: it was interrupted.
        """
        run = self._journal.find(settings, rate)
        if run is None:
            run = self._run(settings, rate)
            self._journal.add(run)
        if "error" in run:
            raise TrialError(run["error"])
        return bool(run["share"] >= self._options.attainment)

    def _run(self, settings: Mapping[str, Any], rate: float) -> dict[str, Any]:
        options = self._options
        if self._served != settings:
            self._stack.close()
            self._served = None
            try:
                self._endpoints = self._stack.enter_context(_serving(options, settings, self._console))
            except TrialError as error:
                return {"settings": dict(settings), "error": str(error)}
            self._served = settings
        bench = _bench(options, rate, *self._endpoints)
        requests, warm_ups = make_load(bench)
        what = f"{rate:.3g} requests/s with {_text(settings)}"
        with waiting_line(self._console, what, announce=False) as waiting:
            try:
                measurement = asyncio.run(measure(bench, requests, warm_ups, on_progress=waiting.tick))
            except CommandError as error:
                return {"settings": dict(settings), "error": str(error)}
        if measurement.is_interrupted:
            raise CommandError(f"interrupted; the same command goes on from {options.journal}")
        return {"settings": dict(settings), "rate": rate, **_figures(measurement)}


def _bench(options: TuneOptions, rate: float, grpc: str, metrics: str) -> BenchOptions:
    """One run."""
    num_prompts = min(max(round(rate * options.seconds), _LOWEST_PROMPTS), _MOST_PROMPTS)
    return BenchOptions(
        model=NAME, base_url=grpc, metrics=metrics, dataset=options.dataset, num_prompts=num_prompts, seed=options.seed,
        arrivals=Arrivals(request_rate=rate, burstiness=options.burstiness, seed=options.seed),
        sampling={"ignore_eos": True}, goodput={"": options.targets},
        tokenizer=options.model if options.dataset.dataset_name == "sharegpt" else None,
    )  # fmt: skip


def _figures(measurement: Measurement) -> dict[str, Any]:
    report = measurement.report
    num_good = sum(one.num_good for one in report.goodput)
    return {"share": num_good / max(report.completed + report.failed, 1), **report.as_dict([50, 95, 99])}


@contextmanager
def _serving(options: TuneOptions, settings: Mapping[str, Any], console: Console) -> Iterator[tuple[str, str]]:
    """A `quire serve` of the model with these settings; yields its gRPC and its /metrics.

    Raises:
        TrialError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="quire-tune-") as folder, tempfile.TemporaryFile() as log:
        try:
            write_model(Path(folder), options.model, NAME, {**options.fixed, **settings})
        except UsageError as error:
            raise TrialError(str(error)) from None
        ports = [word for name in ("grpc", "http", "metrics", "health") for word in (f"--{name}-port", "0")]
        command = [sys.executable, "-m", "quire_cli", "serve", "--model-repository", folder, *ports, "--no-dashboard",
                   "--no-openai"]  # fmt: skip
        server = process.start(command, os.environ, signal_when_orphaned=signal.SIGTERM, stdout=subprocess.PIPE,
                               stderr=log.fileno())  # fmt: skip
        try:
            with waiting_line(console, f"starting a server with {_text(settings)}", announce=False):
                assert server.stdout is not None
                ready = _READY.match(server.stdout.readline().decode())
            if ready is None:
                server.wait()
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
                raise TrialError(
                    lines[-1].removeprefix("quire: ") if lines else f"the server ended: {server.returncode}"
                )
            yield ready[1], ready[2]
        finally:
            _stop(server)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()


def _text(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items()) or "the defaults"


def _describe(trial: Trial) -> str:
    if trial.error:
        return f"{_text(trial.settings)}: cannot be served: {printable(trial.error)}"
    return f"{_text(trial.settings)}: {f'{trial.rate:.3g} requests/s' if trial.rate else 'no better'}"


def _report(options: TuneOptions, trials: Sequence[Trial], best: Trial | None) -> list[str]:
    """Lines for people: all trials, and what to paste."""
    targets = ", ".join(f"{name} {value:g} ms" for name, value in asdict(options.targets).items() if value is not None)
    lines = [f"{options.attainment:.0%} of requests within {targets}:", ""]
    lines += [f"{'* ' if trial is best else '  '}{_describe(trial)}" for trial in trials]
    if best is None:
        return [*lines, "", f"No settings meet that, down to {options.start_rate / 64:.3g} requests/s."]
    found = {**options.fixed, **best.settings}
    words = [str(options.model), *(f"'{name}={json.dumps(value)}'" for name, value in found.items())]
    return [
        *lines, "", f"The best bears {best.rate:.3g} requests/s. Its settings for model.json:", "",
        json.dumps(found, indent=2), "",
        f"or: quire model add {' '.join(words)}",
    ]  # fmt: skip
