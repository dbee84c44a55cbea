"""Options that are made of the fields of dataclasses."""

import pytest
from quire_cli.bench import serve as bench_serve
from quire_cli.main import run
from quire_cli.options import BenchOptions


def test_fields_of_all_dataclasses_are_options_and_those_of_one_name_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchOptions] = []
    monkeypatch.setattr(bench_serve, "bench_serve", lambda options, *_, **__: seen.append(options) or 0)
    assert run(["bench", "serve", "--model", "m", "--seed", "5", "--random-input-len", "7", "--request-rate", "3"]) == 0
    (options,) = seen
    assert (options.seed, options.arrivals.seed, options.arrivals.request_rate) == (5, 5, 3.0)
    assert (options.dataset.random_input_len, options.dataset.random_output_len) == (7, 128)


def test_a_value_that_its_dataclass_rejects_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["openai", "--max-n", "0"]) == 2
    assert capsys.readouterr().err == "quire: max_n is 0; it must be at least 1\n"
