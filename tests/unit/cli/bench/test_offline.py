"""`quire bench latency` and `throughput`, with an engine that only counts."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire_engine
from quire_cli.bench.offline import bench_latency, bench_throughput
from quire_cli.main import run
from quire_cli.options import LatencyOptions
from quire_engine.errors import RequestError
from quire_load.datasets import DatasetOptions

CHECKPOINT = Path(__file__).resolve().parents[4] / "model_repository" / "tinypy" / "1" / "model"


class Counter:
    """Takes the place of LLM."""

    made: "list[Counter]" = []  # noqa: RUF012

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.batches: list[list[tuple[int, int]]] = []
        self.made.append(self)

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> list[Any]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        if any(len(one) > 500 for one in ids):
            raise RequestError("prompt", "the prompt is too long")
        self.batches.append([(len(one), param.max_tokens) for one, param in zip(ids, params, strict=True)])
        return [
            SimpleNamespace(prompt_token_ids=one, outputs=[SimpleNamespace(token_ids=[0] * param.max_tokens)])
            for one, param in zip(ids, params, strict=True)
        ]

    def reset_prefix_cache(self) -> None:
        self.batches.append([])

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Counter]:
    # In its dict: asking the module for LLM, as setattr does, would import torch.
    monkeypatch.setitem(vars(quire_engine), "LLM", Counter)
    Counter.made.clear()
    return Counter.made


def test_latency_leaves_the_warm_up_out(capsys: pytest.CaptureFixture[str], made: list[Counter]) -> None:
    """The n-th batch takes n seconds on this clock."""
    times = itertools.accumulate(itertools.chain.from_iterable((0, number) for number in range(1, 20)))
    options = LatencyOptions(input_len=4, output_len=5, batch_size=3, num_iters_warmup=2, num_iters=3)
    bench_latency(CHECKPOINT, {"seed": 1}, options, as_json=True, clock=lambda: float(next(times)))
    values = json.loads(capsys.readouterr().out)
    assert values["latencies"] == [3.0, 4.0, 5.0]
    assert values["avg_latency"] == 4.0
    assert values["percentiles"]["50"] == 4.0
    assert made[0].batches == [[(4, 5)] * 3] * 5
    assert made[0].settings == {"model": str(CHECKPOINT), "seed": 1, "enable_prefix_caching": False}


def test_throughput_counts_tokens(capsys: pytest.CaptureFixture[str], made: list[Counter]) -> None:
    times = iter([10.0, 14.0])
    dataset = DatasetOptions(dataset_name="random", random_input_len=6, random_output_len=2)
    bench_throughput(CHECKPOINT, {}, dataset, 8, seed=0, as_json=True, clock=lambda: next(times))
    values = json.loads(capsys.readouterr().out)
    assert values["requests_per_second"] == 2.0
    assert values["tokens_per_second"] == 16.0
    assert values["output_tokens_per_second"] == 4.0
    assert made[0].batches == [[(6, 2)], [], [(6, 2)] * 8]


def test_both_print_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "latency", "--model", str(CHECKPOINT), "--num-iters", "2", "--num-iters-warmup", "0"]) == 0
    assert capsys.readouterr().out.startswith("average latency  ")
    assert run(["bench", "throughput", "--model", str(CHECKPOINT), "--num-prompts", "3"]) == 0
    assert capsys.readouterr().out.startswith("throughput  ")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["latency", "--num-iters", "0"], 2, "num_iters is 0; it must be at least 1"),
        (["latency", "max_num_seq=1"], 2, "max_num_seq"),
        (["latency", "--input-len", "501"], 1, "the prompt is too long"),
        (["throughput", "--num-prompts", "0"], 2, "num_prompts is 0"),
        (["throughput", "--dataset-name", "x"], 2, "dataset_name is 'x'"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = arguments
    assert run(["bench", name, "--model", str(CHECKPOINT), *rest]) == code
    assert message in capsys.readouterr().err
