"""Runs of an engine that is a few lines of Python, the roofline's arithmetic, sizes of checkpoints."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.harness import engines
from benchmarks.harness.checkpoint_size import kv_bytes_per_token, weight_bytes
from benchmarks.harness.engines import ENGINES, Engine, Job, RunError
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.plot import draw_rates
from benchmarks.harness.processes import peak_memory_bytes, process_tree
from benchmarks.harness.results import Row, Spread
from benchmarks.harness.roofline import Ceilings, ModelShape, decode_roofline_seconds
from benchmarks.workload import make_workload

SCRIPTS = Path(engines.__file__).resolve().parents[1] / "peers"
ENGINE = Engine(name="fake", label="Fake", script="fake.py", variant="any", precision="bf16")
FAKE = """
import sys
sys.path.insert(0, {scripts!r})
import runner

class Fake:
    version = "0.1"
    def __init__(self, arguments):
        print("this is not for the harness")
        self.calls, self.resets = [], 0
    def generate(self, prompts, output_lengths):
        {generate}
        self.calls.append(len(prompts))
        return [prompt[:1] * length for prompt, length in zip(prompts, output_lengths)]
    def reset(self, workload):
        self.resets += 1
    def close(self):
        print(self.calls, "resets", self.resets, file=sys.stderr)

runner.main(Fake)
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(model=tmp_path / "m", workloads=["one_stream", "mixed"], cache=tmp_path, peers=tmp_path, threads=1,
               requests=5)  # fmt: skip


def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generate: str = "") -> None:
    """Make `ENGINE` the above."""
    (tmp_path / "fake.py").write_text(FAKE.format(scripts=str(SCRIPTS), generate=generate or "pass"))
    monkeypatch.setattr(engines, "SCRIPTS", tmp_path)


def test_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job) -> None:
    fake_engine(monkeypatch, tmp_path)
    runs = engines.run(ENGINE, job, tmp_path / "log")
    assert [(run.workload, run.requests, run.version) for run in runs] == [
        *[("one_stream", 1, "0.1")] * 3, ("mixed", 5, "0.1"),
    ]  # fmt: skip
    assert all(run.peak_memory_bytes > 2**20 and run.ready_seconds > run.load_seconds for run in runs)
    log = (tmp_path / "log").read_text()
    assert "this is not for the harness" in log
    assert "[2, 1, 1, 1, 2, 5]" in log  # each workload is warmed up, and the engine was closed
    assert all(run.outputs is None for run in runs)


def test_outputs_are_kept_for_jobs_that_want_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job) -> None:
    fake_engine(monkeypatch, tmp_path)
    (run,) = engines.run(ENGINE, replace(job, workloads=["copying"], outputs=True), tmp_path / "log")
    workload = make_workload("copying")
    assert run.outputs == [workload.prompts[0][:1] * workload.output_lengths[0]]


def test_prompts_that_the_warm_up_caches_are_not_reset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job
) -> None:
    fake_engine(monkeypatch, tmp_path)
    job = replace(job, workloads=["long_context"])
    with pytest.raises(RunError, match="long_context needs --prefix-caching"):
        engines.run(ENGINE, job, tmp_path / "log")
    engines.run(ENGINE, replace(job, prefix_caching=True), tmp_path / "log")
    assert "[5, 5] resets 1" in (tmp_path / "log").read_text()


def test_rate_of_prompts_alone_is_that_of_their_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job
) -> None:
    fake_engine(monkeypatch, tmp_path)
    one, many = engines.run(ENGINE, replace(job, workloads=["long_prompts", "mixed"]), tmp_path / "log")
    assert one.rate * one.seconds == pytest.approx(4 * 2048)
    assert many.rate * many.seconds == pytest.approx(many.output_tokens)


def test_a_file_that_another_engine_converts_is_converted_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job
) -> None:
    (tmp_path / "fake.py").write_text("import sys; open(sys.argv[1], 'a').write(sys.argv[3] + ' ')")
    monkeypatch.setattr(engines, "SCRIPTS", tmp_path)
    other, reader = replace(ENGINE, name="other", variant="theirs"), replace(ENGINE, variant="ours", file_of="other")
    monkeypatch.setattr(engines, "ENGINES", [other])
    engines.prepare(reader, job, tmp_path / "log")
    assert job.model.read_text() == "theirs ours "
    monkeypatch.setattr(engines, "ENGINES", [replace(other, peer="vllm")])
    with pytest.raises(RunError, match="vllm is not installed"):
        engines.prepare(reader, job, tmp_path / "log")


@pytest.mark.parametrize(
    ("generate", "reason"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("return [[1]]", "asked for outputs of"),
        ("import os; os._exit(3)", "ended too early"),
    ],
)
def test_failed_run_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job, generate: str, reason: str
) -> None:
    fake_engine(monkeypatch, tmp_path, generate)
    with pytest.raises(RunError, match=reason):
        engines.run(ENGINE, job, tmp_path / "log")


def test_run_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job) -> None:
    fake_engine(monkeypatch, tmp_path, "import time; time.sleep(1000)")
    monkeypatch.setattr(engines, "RUN_SECONDS", 1.0)
    with pytest.raises(RunError, match="took too long"):
        engines.run(ENGINE, job, tmp_path / "log")


def test_what_a_killed_peer_leaves_in_shared_memory_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: Job
) -> None:
    left = tmp_path / "shm"
    left.mkdir()
    (left / "__KMP_REGISTERED_LIB_1_0").touch()  # another's
    monkeypatch.setattr(engines, "SHARED_MEMORY", left)
    fake_engine(
        monkeypatch, tmp_path, f"import os; open(f'{left}/__KMP_REGISTERED_LIB_{{os.getpid()}}_0', 'w').close()"
    )
    engines.run(ENGINE, job, tmp_path / "log")
    assert [file.name for file in left.iterdir()] == ["__KMP_REGISTERED_LIB_1_0"]


def test_missing_peer_is_told_with_the_way_to_install_it(tmp_path: Path) -> None:
    reason = engines.find_peer(tmp_path, "vllm")
    assert reason is not None
    assert f"setup.sh vllm {tmp_path / 'vllm'}" in reason
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / ".installed").touch()
    assert engines.find_peer(tmp_path, "vllm") is None


def test_every_engine_has_its_script_and_its_environment() -> None:
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    setup = (SCRIPTS / "setup.sh").read_text()
    for engine in ENGINES:
        assert (SCRIPTS / engine.script).exists()
        assert engine.file_of is None or engine.file_of in {other.name for other in ENGINES if other.peer}
        assert engine.peer is None or f"install_{engine.peer}()" in setup


def test_settings_are_for_ours_only(job: Job) -> None:
    ours, peer = ENGINES[0], next(engine for engine in ENGINES if engine.peer)
    told = replace(job, settings={"block_size": 32})
    assert told.command(ours)[0] == sys.executable
    assert json.dumps({"block_size": 32}) in told.command(ours)
    assert json.dumps({"block_size": 32}) not in told.command(peer)
    assert json.dumps({"spec-type": "x"}) in told.command(replace(peer, settings={"spec-type": "x"}))
    assert json.dumps({"seed": 1, "block_size": 32}) in told.command(replace(ours, settings={"seed": 1}))


def test_peak_memory_counts_children() -> None:
    code = "x = bytearray(64 * 2**20); x[::4096] = bytes(len(x[::4096])); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process_tree(os.getpid())
        assert peak_memory_bytes(child.pid) > 64 * 2**20
        assert peak_memory_bytes(os.getpid()) > peak_memory_bytes(child.pid)
        child.stdin.close()


def test_roofline_is_what_is_slower_reading_or_computing() -> None:
    shape = ModelShape(linear_parameters=1000, num_layers=2, num_heads=4, head_size=8, kv_bytes_per_token=64)
    ceilings = Ceilings(bytes_per_second=1e3, flops_per_second=1e4)
    linears, keys = 2.0, 10 * 64 / 1e3  # one request reads more than it computes
    assert decode_roofline_seconds(shape, ceilings, 1, 10) == pytest.approx(linears + keys)
    assert decode_roofline_seconds(shape, ceilings, 100, 10) == pytest.approx(20.0 + 100 * keys)


def test_sizes_of_a_checkpoint(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "num_key_value_heads": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(tmp_path) == 2 * 3 * 2 * 16 * 2
    tensors = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [10, 4], "data_offsets": [0, 80]},
        "model.layers.0.mlp.down_proj.weight": {"dtype": "BF16", "shape": [4, 6], "data_offsets": [80, 128]},
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    assert weight_bytes(tmp_path) == 128
    assert weight_bytes(tmp_path, quantized=True) == 104
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert weight_bytes(tmp_path, quantized=True) == 64


def test_machine_is_described_from_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: A processor\nflags\t\t: fpu avx2 avx512_bf16 sse\n")
    (tmp_path / "meminfo").write_text("MemTotal:       25165824 kB\nMemFree: 1 kB\n")
    machine = describe_machine(tmp_path / "cpuinfo", tmp_path / "meminfo")
    assert (machine["processor"], machine["instructions"]) == ("A processor", "avx2 avx512_bf16")
    assert machine["memory"] == "24 GiB"


def test_plot_is_a_picture_with_longer_bars_for_faster_engines(tmp_path: Path) -> None:
    from PIL import Image

    def row(label: str, rate: float, is_ours: bool) -> Row:
        rates = {"64 requests": Spread(rate, rate, rate)}
        return Row(label=label, version="1", precision="bf16", is_ours=is_ours, rates=rates, ratios={},
                   ready_seconds=1.0, peak_memory_bytes=1.0)  # fmt: skip

    draw_rates({"m400": [row("Ours", 200.0, True), row("Theirs", 50.0, False)]}, "Title", "note", tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as image:
        colours = {colour: count for count, colour in image.getcolors(1 << 20)}
    ours, theirs = colours[(0x0F, 0x76, 0x6E)], colours[(0x94, 0xA3, 0xB8)]
    assert ours / theirs == pytest.approx(4.0, rel=0.05)
