"""`quire tune`: the search, its journal, and both together over servers whose capacity is known."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire_cli.bench import tune as tuner
from quire_cli.bench.serve import Measurement
from quire_cli.bench.tune_journal import Journal
from quire_cli.bench.tuning import Trial, TrialError, highest_rate, search
from quire_cli.errors import CommandError, UsageError
from quire_cli.main import run
from quire_cli.options import BenchOptions
from quire_load.datasets import SampleRequest
from quire_load.load import RequestRecord
from quire_load.report import summarize

CHECKPOINT = str(Path(__file__).resolve().parents[4] / "model_repository" / "tinypy" / "1" / "model")


# -- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.02, 0.3, 1.0, 1.99, 7.3, 500.0])
def test_the_highest_rate_is_found(capacity: float) -> None:
    asked: list[float] = []

    def meets(rate: float) -> bool:
        asked.append(rate)
        return rate <= capacity

    assert capacity / 1.05 <= highest_rate(meets, 1.0, 0.05) <= capacity
    assert len(asked) < 20


def test_what_bears_nothing_or_everything_ends_too() -> None:
    assert highest_rate(lambda rate: False, 1.0, 0.1) == 0.0
    assert highest_rate(lambda rate: True, 1.0, 0.1) == 4096.0


def capacity(settings: Mapping[str, Any]) -> float:
    """Each of these gains; together more than alone. 256 sequences are worse than none said."""
    gain = {None: 1.0, 16: 1.5, 256: 0.5}[settings.get("seqs")] * (2.0 if settings.get("int8") else 1.0)
    return 4.0 * gain


def test_settings_are_tried_beside_the_best_so_far() -> None:
    runs: list[tuple[str, float]] = []

    def meets(settings: Mapping[str, Any], rate: float) -> bool:
        runs.append((json.dumps(settings), rate))
        if settings.get("broken"):
            raise TrialError("no such device")
        return rate <= capacity(settings)

    space: dict[str, Sequence[Any]] = {"seqs": [16, 256], "broken": [True], "int8": [None, True]}
    trials = search(space, meets, start=1.0, precision=0.05)
    assert [(trial.settings, trial.is_best, trial.error) for trial in trials] == [
        ({}, True, ""),
        ({"seqs": 16}, True, ""),
        ({"seqs": 256}, False, ""),
        ({"seqs": 16, "broken": True}, False, "no such device"),
        ({"seqs": 16, "int8": True}, True, ""),
    ]
    assert trials[-1].rate == pytest.approx(12.0, rel=0.05)
    assert sum(settings == '{"seqs": 256}' for settings, _ in runs) == 1  # one run tells that it is no better


# -- the journal ------------------------------------------------------------------------------------------------------


def test_a_journal_knows_its_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    journal = Journal(path, {"model": "a", "seconds": 2.0})
    journal.add({"settings": {"x": None}, "rate": 1 / 3, "share": 0.5})
    journal.add({"settings": {"y": 1}, "error": "no"})
    path.write_text(path.read_text() + '{"settings": {"z"')  # the machine went down
    again = Journal(path, {"model": "a", "seconds": 2.0})
    assert again.num_known == 2
    assert again.find({"x": None}, 1 / 3) == {"settings": {"x": None}, "rate": 1 / 3, "share": 0.5}
    assert again.find({"x": None}, 2.0) is None
    assert (again.find({"y": 1}, 5.0) or {})["error"] == "no"
    again.add({"settings": {}, "rate": 1.0, "share": 1.0})
    assert Journal(path, {"model": "a", "seconds": 2.0}).num_known == 3


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    Journal(path, {"model": "a", "seconds": 2.0})
    with pytest.raises(UsageError, match="another seconds; choose another file"):
        Journal(path, {"model": "a", "seconds": 3.0})
    path.write_text("notes\n")
    with pytest.raises(UsageError, match="is no journal of quire tune"):
        Journal(path, {"model": "a"})
    with pytest.raises(CommandError, match="cannot be written"):
        Journal(tmp_path / "absent" / "tune.jsonl", {})


# -- both -------------------------------------------------------------------------------------------------------------


class Machine:
    """Serves anything but a quantisation that there is not, at a known capacity, and can be interrupted."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.served: list[dict[str, Any]] = []
        self.stop_after = 10**9

    @contextmanager
    def serving(
        self, options: tuner.TuneOptions, settings: Mapping[str, Any], console: Any
    ) -> Iterator[tuple[str, str]]:
        if settings.get("quantization") == "int3":
            raise TrialError("quantization is 'int3'")
        self.served.append({**options.fixed, **settings})
        yield "a:1", "a:2"

    async def measure(
        self, options: BenchOptions, requests: Sequence[SampleRequest], warm_ups: Any, on_progress: Any
    ) -> Measurement:
        self.num_runs += 1
        settings = self.served[-1]
        bears = 6.0 if settings.get("max_num_seqs") == 32 else 3.0
        ttft = 0.1 if options.arrivals.request_rate <= bears else 9.0
        record = RequestRecord(scheduled_s=0.0, token_times_s=[ttft], ended_s=ttft, num_output_tokens=1)
        return Measurement(report=summarize([record] * len(requests), options.goodput), server=None,
                           no_server="", is_interrupted=self.num_runs > self.stop_after)  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(tuner, "_serving", made.serving)
    monkeypatch.setattr(tuner, "measure", made.measure)
    return made


def tune(journal: Path, *arguments: str) -> int:
    space = ["--try", "max_num_seqs=[32]", "--try", 'quantization=["int3"]', "dtype=float32"]
    own = ["--model", CHECKPOINT, "--slo", "ttft:500", "--journal", str(journal), "--seconds", "3"]
    return run(["tune", *own, *space, *arguments])


def test_why_a_server_did_not_start_controls_no_terminal() -> None:
    said = tuner._describe(Trial(settings={"dtype": "x"}, rate=0, error="it says \x1b[2J"))
    assert said == r'dtype="x": cannot be served: it says \x1b[2J'


def test_the_best_settings_are_told_to_be_pasted(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path / "tune.jsonl") == 0
    captured = capsys.readouterr()
    assert '{\n  "dtype": "float32",\n  "max_num_seqs": 32\n}' in captured.out
    assert "quire model add" in captured.out
    assert "* max_num_seqs=32: 5." in captured.out
    assert "cannot be served: quantization is 'int3'" in captured.out
    assert machine.served == [{"dtype": "float32"}, {"dtype": "float32", "max_num_seqs": 32}]


def test_an_interrupted_search_goes_on_where_it_was(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path / "whole.jsonl", "--json") == 0
    whole, num_runs = json.loads(capsys.readouterr().out), machine.num_runs
    machine.num_runs, machine.stop_after = 0, 5
    assert tune(tmp_path / "tune.jsonl", "--json") == 1
    assert "interrupted; the same command goes on from" in capsys.readouterr().err
    machine.num_runs, machine.stop_after = 0, 10**9
    assert tune(tmp_path / "tune.jsonl", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == whole
    assert "5 runs are in" in captured.err
    assert machine.num_runs == num_runs - 5


def test_objectives_that_nothing_meets(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tmp_path / "tune.jsonl", "--slo", "ttft:50") == 1
    assert "No settings meet that, down to 0.0156 requests/s." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "fast"], "slo is 'fast'"),
        (["--slo", "chat=ttft:5"], "slo is 'chat=ttft:5'; it has no class here"),
        (["--try", "max_num_seqs"], "try is 'max_num_seqs'; it must be KEY=[VALUE, …]"),
        (["--try", "dtype=[1]"], "dtype is tried, and has a value as well"),
        (["--attainment", "2"], "attainment is 2.0"),
        (["--seconds", "0"], "seconds is 0.0"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/absent"], "dataset_path /absent cannot be read"),
    ],
)
def test_bad_options_are_wrong_usage(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path / "tune.jsonl", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "tune.jsonl").exists()
