"""What speculative decoding gains, and that it changes no token: by model, method, workload and number of streams.

    python tests/benchmarks/speculation.py [--models m400 …] [--quantizations bf16 int8] [--methods ngram suffix …]
                                           [--workloads copy …] [--streams 1 4 16 64] [--rounds 2] [--processes 1]
                                           [--out FOLDER]
    python tests/benchmarks/speculation.py --models tinypy --methods draft_model eagle3 medusa --workloads files
                                           files_sampled --streams 1 4 16     # drafts by models, on what they know

Engines with and without drafts stand in one process and take turns with the same tasks; every round has new tasks, as
what was said before could be drafted from, and goes through the engines in the other order. The prompts are computed
before the clock starts; the column `with prompt` is the ratio if their time counts, too. A ratio is taken within each
round: the median is quoted, with the smallest and the largest. The acceptance length is the mean number of tokens that
a step yields for a request that has a draft.

Two engines of one process may differ by a few per cent for as long as it lives, even where both do the same. Small
differences therefore take `--processes 7`: each cell is measured in so many fresh ones, every other of which makes its
engines in the other order; the ratio is then the median of the processes' own, with the smallest and the largest.

Which text is forced, and why. m400 and s60 have random weights, whose text never repeats, so that no draft would ever
be right. In the workloads `copy`, `agentic`, `chat` and `misleading` their text, and tinypy's, is therefore given:
everything is computed and sampled as ever, and then the token is replaced by the text's (harness/forced_text.py). The
texts, and where they come from, are in harness/texts.py. That tokens are the same with and without drafts is then no
wonder. Everything else is the model's own text, and there each token that differs counts:

    random, greedy    random prompts, at temperature 1 and greedily
    files             tinypy, a small model that was really trained, goes on with files it was trained with, greedily
    files_sampled     the same at temperature 0.7
    walk              m400-walk, made so that its greedy text is its prompt with edits (harness/walk.py)

Drafts by a model need one that was trained for it, which tinypy has: beside its folder are `draft`, `eagle3` and
`medusa`, and what is not there is passed over. `mtp` needs a checkpoint with a layer of multi-token prediction: give
its folder among `--models`, which has tinypy's workloads, or tinypy-mtp. That is tinypy with such a layer, which is
trained before the first measurement (checkpoints.py). m400-walk-mtp has a layer of the size of m400's that drafts its
walk with mistakes. They draft only the model's own text, as they know what the model says, not what is forced. With
`--acceptance rejection` sampled requests get other tokens, so that only speed and acceptance length are compared. A
model that drafts computes the prompts, too, with the first draft: that is a part of the prompts' time.

Then drafting from the text so far in other engines, as far as peers/setup.sh has installed them: m400-walk, one stream,
each in a process of its own (harness/lookups.py).

Bars, printed as met or missed: at one stream of `copy` suffix gains 2.5 times, ngram 1.8 times; with `random` and
`greedy`, nothing is ever below 0.97. Ends with 1 if a token differs. s60 takes some twenty minutes on two cores, and
all models hours (`--models s60 m400 tinypy m400-walk`): leave the machine alone meanwhile.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint
from harness.checkpoint_size import draft_bytes_per_token, kv_bytes_per_token, weight_bytes
from harness.drafting import FIRST_SEED, Cell, Figures, count_wrong, judge, run_batch, table, way_name
from harness.engines import Job, cache_folder
from harness.forced_text import ForcedTexts, force_texts
from harness.lookups import lookup_table, lookups, run_lookups
from harness.machine import describe_machine
from harness.texts import FILES_AT_ONCE, WORKLOADS, NoMoreTextsError, Task, Texts
from quire_engine import LLM
from tokenizers import Tokenizer
from workload import WALK_LENGTH, copying_task, make_workload

ROOT = Path(__file__).resolve().parents[2]
TINYPY = ROOT / "model_repository" / "tinypy" / "1" / "model"
MODELS = {
    "m400": WORKLOADS,
    "s60": WORKLOADS,
    "tinypy": ("files", "files_sampled", "agentic", "chat", "random", "greedy", "misleading"),
    "m400-walk": ("walk",),
    "m400-walk-mtp": ("walk",),
}
MODELS["tinypy-mtp"] = MODELS["tinypy"]
"""Models and their workloads; those of tinypy are those of any checkpoint whose folder is given, too."""
TEMPERATURES = {"files": 0.0, "files_sampled": 0.7, "walk": 0.0, "random": 1.0, "greedy": 0.0}
"""Of the workloads that are the model's own text."""
LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {},
}
"""Methods that draft from text, and their settings."""
DRAFTS = {"draft_model": "draft", "eagle3": "eagle3", "medusa": "medusa"}
"""Those that have a model, and its folder, beside tinypy's."""
METHODS = (*LOOKUPS, *DRAFTS, "mtp")
ACCEPTANCE = ("exact", "rejection")
OWN_COPIES = ("files", "files_sampled", "walk")
"""Workloads of certain models, which take the place of `copy`."""
COPY_PROMPT_TOKENS = 1536
"""Or fewer, where the model's context is shorter."""
MAX_NUM_SEQS = 64
BLOCK_SIZE = 16
WARM_UP_TOKENS = 24
FIRST_TOKENS = 3
"""Of a request, with which a model drafts at least once, and so computes its keys and values of the prompt."""
MIN_SECONDS, MAX_ROUNDS = 4.0, 8
"""Cells whose rounds together take less have more of them, up to this number."""
MEMORY_SHARE = 0.8
"""Of the free memory, for all engines of one process."""
OFF = "off"
"""The engine without drafts, among the names of ways to draft."""
Config = dict[str, Any]
"""A `speculative_config`."""


def say(line: str) -> None:
    """Progress, as it comes."""
    print(line, file=sys.stderr, flush=True)


def drafts_by_model(config: Config | None) -> bool:
    """Whether a model drafts, and not a look-up of text."""
    return config is not None and config["method"] not in LOOKUPS


class Model:
    """A checkpoint and the tasks for it.

    Args:
        name: of `MODELS`, or of another checkpoint's folder.
        folder: of the checkpoint.
        num_tokens: length of all outputs.
    """

    def __init__(self, name: str, folder: Path, num_tokens: int) -> None:
        self.name, self.folder, self.num_tokens = name, folder, num_tokens
        self.workloads = MODELS.get(name, MODELS["tinypy"])
        config = json.loads((folder / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.has_mtp = bool(config.get("num_nextn_predict_layers"))
        self.max_prompt_tokens = min(COPY_PROMPT_TOKENS, config["max_position_embeddings"] - num_tokens)
        self.max_model_len = self.max_prompt_tokens + num_tokens
        vocab_size = min(config["vocab_size"], tokenizer.get_vocab_size())
        self._texts = Texts(
            lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            vocab_size, num_tokens, self.max_prompt_tokens,
        )  # fmt: skip
        self._num_walks = 0
        self._next_seed = FIRST_SEED + MAX_NUM_SEQS  # those before it are for warming up

    def seeds(self, streams: int) -> int:
        """The first of so many seeds that no other tasks have."""
        first, self._next_seed = self._next_seed, self._next_seed + streams
        return first

    def tasks(self, workload: str, streams: int) -> list[Task]:
        """New ones.

        Raises:
            NoMoreTextsError: all have been given.
        """
        if workload in ("files", "files_sampled"):
            return self._texts.continued_files(streams)
        if workload == "walk":
            first, self._num_walks = self._num_walks, self._num_walks + streams
            if self._num_walks * self.num_tokens >= WALK_LENGTH:
                raise NoMoreTextsError("the walk has no more stretches: fewer rounds, streams or tokens")
            numbers = range(first, self._num_walks)
            return [Task(copying_task(i, self.num_tokens, self.max_prompt_tokens // 2)[0], None) for i in numbers]
        return self._texts.make(workload, streams)

    def warm_up_tasks(self, streams: int) -> list[Task]:
        """Short prompts with much to draft from."""
        return self._texts.looping(streams)

    def configs(self, methods: Sequence[str], acceptances: Sequence[str], further: dict[str, Any]) -> dict[str, Config]:
        """The `speculative_config` of each way of drafting that there is for it.

        Args:
            methods: of `METHODS`.
            acceptances: of those that have a model.
            further: settings of all.
        """
        configs = {}
        for method in methods:
            folder = self.folder.parent / DRAFTS.get(method, "")
            if method in LOOKUPS:
                configs[method] = {"method": method, **LOOKUPS[method], **further}
            elif method == "mtp":
                if not self.has_mtp:
                    say(f"mtp is passed over: {self.name} has no layer of multi-token prediction")
                    continue
                for acceptance in acceptances:
                    configs[way_name(method, acceptance)] = {"method": method, "acceptance": acceptance, **further}
            elif self.name != "tinypy":
                say(f"{method} is passed over: no model was trained to draft for {self.name}")
            elif not folder.is_dir():
                say(f"{method} is passed over: there is no folder {folder}")
            else:
                for acceptance in acceptances:
                    own = {"method": method, "model": str(folder), "acceptance": acceptance, **further}
                    configs[way_name(method, acceptance)] = own
        return configs

    def cache_bytes(self, streams: int, config: Config | None = None) -> int:
        """KV cache of one engine: room for all streams of any workload, so that no prompt leaves it before its turn.

        Args:
            streams: the most.
            config: how it drafts: a model that does takes a part of the cache.
        """
        files = FILES_AT_ONCE * self.max_prompt_tokens
        prompt = self.max_prompt_tokens if "files" in self.workloads else self.max_prompt_tokens // 2
        own = streams * (prompt + self.num_tokens + 4 * BLOCK_SIZE)
        per_token = kv_bytes_per_token(self.folder)
        if config is not None and drafts_by_model(config):
            per_token += draft_bytes_per_token(config["method"], Path(config.get("model", self.folder)), self.folder)
        return (files + own) * per_token

    def memory_bytes(self, streams: int, config: Config | None = None) -> int:
        """About what an engine takes: weights as they are read and as they are packed, KV cache."""
        num_bytes = weight_bytes(self.folder)
        if config is not None and "model" in config:
            num_bytes += weight_bytes(Path(config["model"]))
        return 2 * num_bytes + self.cache_bytes(streams, config)


@contextmanager
def open_engines(
    model: Model, quantization: str, configs: dict[str, Config], streams: int, is_reversed: bool
) -> Iterator[dict[str, tuple[LLM, ForcedTexts]]]:
    """An engine without drafts, `off`, and one for each way of drafting that the engine has.

    Args:
        model: that all have.
        quantization: `bf16` for none.
        configs: by way of drafting.
        streams: the most at once.
        is_reversed: makes `off` the last one; each has its memory where those before it have left some.
    """
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": None if quantization == "bf16" else quantization,
        "device": "cpu",
        "max_model_len": model.max_model_len,
        "max_num_seqs": MAX_NUM_SEQS,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
    }
    engines: dict[str, tuple[LLM, ForcedTexts]] = {}
    wanted: list[tuple[str, Config | None]] = [(OFF, None), *configs.items()]
    with ExitStack() as stack:
        for name, config in wanted[:: -1 if is_reversed else 1]:
            cache_bytes = model.cache_bytes(streams, config)
            try:
                llm = LLM(model.folder, speculative_config=config, kv_cache_memory_bytes=cache_bytes, **settings)
            except ValueError as error:
                if config is None:
                    raise
                say(f"{name} is passed over: {error}")
                continue
            stack.callback(llm.shutdown)
            engines[name] = llm, force_texts(llm)
        yield engines


def is_measured(config: Config, workload: str) -> bool:
    """Whether a way of drafting has figures of a workload: models draft the model's own text; and how their drafts are
    accepted makes no difference to greedy requests."""
    if not drafts_by_model(config):
        return True
    return workload in TEMPERATURES and (config["acceptance"] == "exact" or TEMPERATURES[workload] > 0)


def measure(
    model: Model,
    quantization: str,
    engines: dict[str, tuple[LLM, ForcedTexts]],
    configs: dict[str, Config],
    workload: str,
    streams: int,
    num_rounds: int,
    process: int,
) -> dict[Cell, Figures]:
    """The figures of each way of drafting with one workload; none if there are not enough texts for all rounds.

    Args:
        model: of all engines.
        quantization: theirs.
        engines: by way of drafting, and `off`; they take turns in this order and its reverse.
        configs: of the ways to draft.
        workload: of `WORKLOADS`, or the model's own.
        streams: at once.
        num_rounds: the fewest.
        process: whose figures these are: its number, from 0.
    """
    ways = [way for way, config in configs.items() if way in engines and is_measured(config, workload)]
    if not ways:
        return {}
    engines = {name: engine for name, engine in engines.items() if name in (OFF, *ways)}
    figures: dict[str, tuple[Cell, Figures]] = {}
    for way in ways:
        method, acceptance = configs[way]["method"], configs[way].get("acceptance", "exact")
        figures[way] = Cell(model.name, quantization, workload, streams, method, acceptance), Figures()
    temperature = TEMPERATURES.get(workload, 0.0)
    first = FILES_AT_ONCE if workload == "copy" else 1
    warm_up = model.warm_up_tasks(streams)
    done = 0.0
    own_text = [Task(task.prompt, None) for task in warm_up]
    for name, (llm, texts) in engines.items():
        tasks = own_text if drafts_by_model(configs.get(name)) else warm_up
        run_batch(llm, texts, tasks, min(WARM_UP_TOKENS, model.num_tokens), temperature=temperature)
    for number in range(max(num_rounds, MAX_ROUNDS)):
        if number >= num_rounds and done >= MIN_SECONDS:
            break
        try:
            tasks = model.tasks(workload, streams)
        except NoMoreTextsError as error:
            say(f"{model.name}, {workload}, {streams} streams: {error}")
            return {}
        batches = {}
        first_seed = model.seeds(streams)
        for name, (llm, texts) in list(engines.items())[:: -1 if number % 2 else 1]:
            gc.collect()
            num_first_tokens = FIRST_TOKENS if drafts_by_model(configs.get(name)) else 1
            batches[name] = run_batch(
                llm, texts, tasks, model.num_tokens, temperature=temperature, first=first,
                num_first_tokens=num_first_tokens, first_seed=first_seed, process=process,
            )  # fmt: skip
        done += batches[OFF].seconds
        for way, (_, own) in figures.items():
            own.off.append(batches[OFF])
            own.on.append(batches[way])
        ratios = ", ".join(f"{name} {batches[OFF].seconds / batches[name].seconds:.2f}" for name in figures)
        say(f"round {number + 1}  {model.name} {quantization} {workload}, {streams} streams: {ratios}")
    return dict(figures.values())


def groups(model: Model, configs: dict[str, Config], streams: int) -> list[dict[str, Config]]:
    """Ways of drafting whose engines have room in memory together; one by one if not all have."""
    free = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    if sum(model.memory_bytes(streams, config) for config in (None, *configs.values())) <= MEMORY_SHARE * free:
        return [configs] if configs else []
    return [{way: config} for way, config in configs.items()]


def measure_model(
    name: str, folder: Path, quantization: str, arguments: argparse.Namespace, process: int = 0
) -> dict[Cell, Figures]:
    """All cells of one model and quantization, in this process, which has this number."""
    model = Model(name, folder, arguments.tokens)
    figures: dict[Cell, Figures] = {}
    streams = sorted(set(arguments.streams))
    workloads = [
        name for name in model.workloads
        if name in (*arguments.workloads, *(OWN_COPIES if "copy" in arguments.workloads else ()))
    ]  # fmt: skip
    all_configs = model.configs(arguments.methods, arguments.acceptance, arguments.speculative)
    for configs in groups(model, all_configs, streams[-1]):
        with open_engines(model, quantization, configs, streams[-1], is_reversed=process % 2 == 1) as engines:
            for workload in workloads:
                for number in streams:
                    figures |= measure(
                        model, quantization, engines, configs, workload, number, arguments.rounds, process
                    )
        gc.collect()
    return figures


def measure_in_processes(
    name: str, folder: Path, quantization: str, arguments: argparse.Namespace
) -> dict[Cell, Figures]:
    """All cells of one model and quantization, in as many fresh processes as wanted, one after the other."""
    figures: dict[Cell, Figures] = {}
    for process in range(arguments.processes):
        say(f"process {process + 1} of {arguments.processes}")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            own = pool.submit(measure_model, name, folder, quantization, arguments, process).result()
        for cell, more in own.items():
            figures.setdefault(cell, Figures()).add(more)
    return figures


def compare_with_peers(arguments: argparse.Namespace, logs: Path) -> str:
    """Lookups of all engines."""
    configs = {
        method: {"method": method, **LOOKUPS[method], **arguments.speculative}
        for method in arguments.methods if method in LOOKUPS
    }  # fmt: skip
    wanted = lookups(arguments.quantizations, configs)
    job = Job(
        model=make_checkpoint("m400-walk", arguments.cache / "checkpoints"),
        workloads=["copying", "copying_prompt"],
        cache=arguments.cache,
        peers=arguments.peers or arguments.cache / "peers",
        threads=arguments.threads,
        outputs=True,
    )
    runs = run_lookups(wanted, job, arguments.rounds, logs, say)
    workload = make_workload("copying")
    expected = copying_task(0, workload.num_output_tokens, workload.num_input_tokens)[1]
    (arguments.out / "lookups.json").write_text(json.dumps([dataclasses.asdict(run) for run in runs]) + "\n")
    return lookup_table(wanted, runs, expected)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["s60"], metavar="MODEL",
                        help=f"{', '.join(MODELS)}, or a checkpoint's folder")  # fmt: skip
    parser.add_argument("--quantizations", nargs="+", choices=["bf16", "int8"], default=["bf16", "int8"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--acceptance", nargs="+", choices=ACCEPTANCE, default=ACCEPTANCE, help="of a model's drafts")
    parser.add_argument("--workloads", nargs="+", choices=(*WORKLOADS, *OWN_COPIES), default=["copy", "agentic", "chat",
                        "random", "greedy"], help=f"`copy` stands for {', '.join(OWN_COPIES)}, too")  # fmt: skip
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 64], help="at most 64")
    parser.add_argument("--tokens", type=int, default=384, help="of each output")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="that measure each cell, one after the other")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--speculative", action="append", default=[], metavar="NAME=JSON",
                        help="a further setting of speculative_config, for all methods")  # fmt: skip
    parser.add_argument("--no-lookups", action="store_true", help="leave out the comparison with other engines")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of checkpoints ($QUIRE_BENCH_CACHE)")
    parser.add_argument(
        "--peers", type=Path, default=os.environ.get("QUIRE_BENCH_PEERS"), help="environments ($QUIRE_BENCH_PEERS)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks" / "speculation")
    arguments = parser.parse_args()
    if not 1 <= min(arguments.streams) <= max(arguments.streams) <= MAX_NUM_SEQS:
        parser.error(f"--streams are {arguments.streams}, and may be 1 to {MAX_NUM_SEQS}")
    for name in arguments.models:
        if name not in MODELS and not Path(name, "config.json").is_file():
            parser.error(
                f"--models has {name!r}, which is neither one of {', '.join(MODELS)} nor a checkpoint's folder"
            )
    if arguments.processes < 1:
        parser.error(f"--processes is {arguments.processes}, and must be at least 1")
    pairs = (item.partition("=") for item in arguments.speculative)
    arguments.speculative = {name: json.loads(value) for name, _, value in pairs}
    return arguments


def main() -> int:
    """Measure, print, write; returns the exit code."""
    arguments = parse()
    logs = arguments.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    machine = describe_machine()
    of_processes = f" in each of {arguments.processes} processes" if arguments.processes > 1 else ""
    report = [f"{machine['processor']}, {arguments.threads} threads, {arguments.tokens} tokens each, medians of "
              f"{arguments.rounds} rounds{of_processes}, {machine['date']}\n"]  # fmt: skip
    print(report[0], flush=True)
    figures: dict[Cell, Figures] = {}

    def tell(part: str) -> None:
        report.append(part)
        print(part, flush=True)
        (arguments.out / "table.md").write_text("\n".join(report))

    for name in arguments.models:
        checkpoints = arguments.cache / "checkpoints"
        folder = TINYPY if name == "tinypy" else Path(name)
        if name in MODELS and name != "tinypy":
            folder = make_checkpoint(name, checkpoints)
        for quantization in arguments.quantizations:
            measure_all = measure_model if arguments.processes == 1 else measure_in_processes
            own = measure_all(name if name in MODELS else folder.name, folder, quantization, arguments)
            figures |= own
            tell(f"### {name}, {quantization}\n\n{table(own)}")
    if not arguments.no_lookups and not LOOKUPS.keys().isdisjoint(arguments.methods):
        tell(f"### m400-walk, one stream, next to others\n\n{compare_with_peers(arguments, logs)}")
    num_differing = count_wrong(figures)
    tell("\n".join([*judge(figures), f"tokens that differ between on and off: {num_differing}"]))
    record = [{**dataclasses.asdict(cell), **dataclasses.asdict(own)} for cell, own in figures.items()]
    (arguments.out / "results.json").write_text(json.dumps({"machine": machine, "cells": record}) + "\n")
    say(f"written to {arguments.out}")
    return 1 if num_differing else 0


if __name__ == "__main__":
    sys.exit(main())
