"""`quire bench serve` against a stand-in of a server."""

import json
import runpy
from pathlib import Path

import pytest
from quire_cli.bench import serve as bench_serve
from quire_cli.bench.serve import parse_weights
from quire_cli.main import run
from quire_cli.options import BenchOptions
from quire_load import server_figures
from support.fake_triton import FakeTriton, fake_triton

LOAD_SCRIPTS = Path(__file__).resolve().parents[3] / "load"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_figures, "_QUIET_S", 0.0)


def bench(fake: FakeTriton, *arguments: str) -> int:
    return run(["bench", "serve", "--model", "tinypy", "--base-url", fake.url, "--metrics", fake.metrics, *arguments])


def test_client_s_and_server_s_figures_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_triton() as fake:
        assert bench(fake, "--num-prompts", "6", "--json") == 0
        values = json.loads(capsys.readouterr().out)
        assert (values["completed"], values["failed"], values["total_output_tokens"]) == (6, 0, 24)
        assert values["server"]["num_ttft"] == 6  # the warm-up's are not among them
        assert 10 < values["server"]["median_ttft_ms"] < 50
        assert values["request_rate"] == "inf"
        assert bench(fake, "--num-prompts", "2", "--max-concurrency", "1", "--goodput", "ttft:5000") == 0
        out = capsys.readouterr().out
        assert "2 answered, 0 failed" in out
        assert "2 of 2; by the server's targets 2 of 2" in out


def test_without_metrics_the_client_s_figures_are_told_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_triton() as fake:
        assert bench(fake, "--num-prompts", "2", "--metrics", fake.url) == 0
    assert "The server's own figures are not here" in capsys.readouterr().out


def test_a_server_that_is_away_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_triton() as fake:
        pass
    assert bench(fake) == 1
    assert capsys.readouterr().err.startswith("quire: the warm-up's request failed: disconnected: ")


def test_failed_requests_are_told_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_triton() as fake:
        fake.state.words = []
        assert bench(fake, "--num-prompts", "3", "--num-warmups", "0") == 1
    captured = capsys.readouterr()
    assert "0 answered, 3 failed, 3 error" in captured.out
    assert "quire: 3 error: the answer ended without a token" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "request_rate is 0.0"),
        (["--backend", "http"], "backend is 'http'; it must be one of grpc, generate-stream"),
        (["--base-url", "http://x:1"], "for backend grpc it must be HOST:PORT"),
        (["--backend", "openai", "--base-url", "x:1"], "for backend openai it must be http://HOST:PORT"),
        (["--dataset-name", "sharegpt"], "dataset_path is not given"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/absent"], "dataset_path /absent cannot be read"),
        (["--goodput", "fast"], "goodput is 'fast'"),
        (["--slo-class", "chat:0"], "slo_class is 'chat:0'"),
        (["--lora", ":2"], "lora is ':2'"),
        (["--metric-percentiles", "0"], "--metric-percentiles is '0'"),
        (["--extra-body", "[]"], "--extra-body is '[]'"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--num-warmups", "-1"], "num_warmups is -1"),
        (["--request-timeout", "0"], "request_timeout is 0.0"),
    ],
)
def test_bad_options_are_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--model", "tinypy", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_metrics_are_looked_for_on_the_server_s_host() -> None:
    assert BenchOptions(model="m").metrics_endpoint == "127.0.0.1:8002"
    assert BenchOptions(model="m", base_url="gpu:1").metrics_endpoint == "gpu:8002"
    assert BenchOptions(model="m", backend="openai", base_url="http://gpu:1/v1").metrics_endpoint == "gpu:8002"
    assert BenchOptions(model="m", metrics="x:5").metrics_endpoint == "x:5"


def test_classes_have_weights() -> None:
    assert parse_weights("slo_class", ["chat:3", "batch"]) == {"chat": 3.0, "batch": 1.0}


@pytest.mark.parametrize(
    ("script", "backend", "is_closed_loop"),
    [
        ("grpc_streams", "grpc", False),
        ("generate_stream", "generate-stream", False),
        ("openai_chat", "openai-chat", True),
    ],
)
def test_the_load_scripts_are_this_command(
    script: str, backend: str, is_closed_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BenchOptions] = []
    monkeypatch.setattr(bench_serve, "bench_serve", lambda options, *_, **__: seen.append(options) or 0)
    monkeypatch.setattr("sys.argv", [script, "--num-prompts", "5"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(LOAD_SCRIPTS / f"{script}.py"))
    assert end.value.code == 0
    assert (seen[0].backend, seen[0].num_prompts, seen[0].arrivals.is_closed_loop) == (backend, 5, is_closed_loop)


def test_vectors_have_an_end_and_no_times_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_triton() as fake:
        assert bench(fake, "--task", "embed", "--num-prompts", "5", "--extra-body", '{"dimensions": 2}') == 0
        out = capsys.readouterr().out
        assert "5 answered, 0 failed" in out
        assert "input tokens/s" in out
        for name in ("output", "first token", "inter-token", "per output token"):
            assert name not in out
        assert {"task": "embed", "dimensions": 2} in [parameters for _, parameters in fake.state.prompts]
        assert bench(fake, "--task", "embed", "--num-prompts", "5", "--json") == 0
        values = json.loads(capsys.readouterr().out)
        assert (values["completed"], values["total_input_tokens"]) == (5, 15)
        assert "median_e2el_ms" in values
        assert not [name for name in values if "ttft" in name or "output" in name]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"task": "dance"}, "task is 'dance'"), ({"task": "embed", "backend": "openai-chat"}, "backend is 'openai-chat'")],
)
def test_a_task_has_its_own_endpoints(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOptions(model="m", **options)
