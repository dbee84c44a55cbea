"""Drafting in other engines: what they are told, and the table of what came out."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.harness import engines
from benchmarks.harness.engines import ENGINES, Job
from benchmarks.harness.lookups import PEERS, Lookup, LookupRun, lookup_table, lookups, run_lookups

SCRIPTS = Path(engines.__file__).resolve().parents[1] / "peers"
FAKE = """
import json, sys
sys.path.insert(0, {scripts!r})
import runner

class Fake:
    version = "0.1"
    def __init__(self, arguments):
        self.settings = json.loads(arguments.settings)
        if "spoiled" in self.settings:
            raise SystemExit("spoiled")
    def generate(self, prompts, output_lengths):
        return [[prompts[0][-1] + self.settings.get("error", 0)] * length for length in output_lengths]
    def reset(self, workload):
        pass
    def close(self):
        pass

runner.main(Fake)
"""


def test_every_way_has_its_engine_off_and_on() -> None:
    config = {"method": "ngram"}
    found = {lookup.on.name: lookup for lookup in lookups(["bf16", "int8"], {"ngram": config})}
    assert found["quire-ngram"].on.settings == {"speculative_config": config}
    assert found["quire-int8-ngram"].off.name == "quire-int8"
    assert {lookup.on.peer for lookup in found.values()} == {None, *PEERS}
    for lookup in found.values():
        assert lookup.on == replace(lookup.off, name=lookup.on.name, settings=lookup.on.settings)
        assert lookup.off in ENGINES
    assert {lookup.on.precision for lookup in lookups(["int8"], {})} == {"int8"}
    assert len(found) == 2 + 2 * 3


def run(engine: str, number: int, seconds: float, output: list[int]) -> LookupRun:
    return LookupRun(engine, "1.2", number, 1.0, seconds, output)


def test_table_pairs_rounds_and_counts_tokens() -> None:
    on = replace(ENGINES[0], name="on")
    absent = replace(ENGINES[0], name="absent")
    runs = [
        run(ENGINES[0].name, 0, 5.0, [1, 2, 3]), run("on", 0, 2.0, [1, 2, 3]),
        run(ENGINES[0].name, 1, 3.0, [1, 2, 9]), run("on", 1, 2.0, [1, 7, 3]),
        run(ENGINES[0].name, 2, 3.0, [1, 2, 3]),
    ]  # fmt: skip
    text = lookup_table([Lookup("ours", ENGINES[0], on), Lookup("none", ENGINES[0], absent)], runs, [1, 2, 3])
    lines = text.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2:] == ["| ours | 1.2 | 0.8 | 2.0 | 3.00 [2.00, 4.00] | 2.00 | 2 | 2 |"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    (tmp_path / "fake.py").write_text(FAKE.format(scripts=str(SCRIPTS)))
    monkeypatch.setattr(engines, "SCRIPTS", tmp_path)
    return Job(model=tmp_path / "m", workloads=["copying", "copying_prompt"], cache=tmp_path, peers=tmp_path,
               threads=1, outputs=True)  # fmt: skip


def test_runs_take_turns_and_what_fails_is_told(job: Job, tmp_path: Path) -> None:
    off = replace(ENGINES[0], name="off", script="fake.py")
    on = replace(off, name="on", settings={"error": 1})
    spoiled = replace(off, name="spoiled", settings={"spoiled": 1})
    peer = replace(off, name="peer", peer="nowhere")
    said: list[str] = []
    wanted = [Lookup(one.name, off, one) for one in (on, spoiled, peer)]
    runs = run_lookups(wanted, job, 2, tmp_path, said.append)
    assert [(one.engine, one.round) for one in runs] == [("off", 0), ("on", 0), ("on", 1), ("off", 1)]
    assert runs[0].output == [runs[1].output[0] - 1] * 256
    assert any("nowhere is not installed" in line for line in said)
    assert any("spoiled: ended too early" in line for line in said)
