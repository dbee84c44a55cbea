"""The commands of docs/load-testing.md, as they stand there: the model that is set up, and the load generators.

Those of others take a gigabyte each and minutes to install, so they are not installed for the tests: where
`QUIRE_BENCH_PEERS` (or the cache of the benchmarks) has them, they run. What the first two send is tested without them.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pytest
from benchmarks.harness.engines import SCRIPTS, cache_folder, find_peer
from quire_load.datasets import MIXED_OUTPUT
from quire_load.server_figures import HISTOGRAMS
from quire_monitoring.definitions import MetricKind, make_metrics
from support.clients import run, sse
from support.serving import ROOT, Server, run_cli, serve

pytestmark = pytest.mark.server

PAGE = (ROOT / "docs" / "load-testing.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
PEERS_ON_PAGE = "~/.cache/quire-bench/peers"
FOLDER_ON_PAGE = "build/load"
NUM_REQUESTS = 40
MOST_APART = 50
"""Client's latency over the server's: no machine is ever so busy, and a wrong unit makes it a thousand."""
PEERS = Path(os.environ.get("QUIRE_BENCH_PEERS") or cache_folder() / "peers")


def command(words: str) -> str:
    """The one command of the page that holds these words."""
    (found,) = [line for line in COMMANDS if words in line]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of the page's folder."""
    return tmp_path_factory.mktemp("load")


@pytest.fixture(scope="module")
def measured(folder: Path) -> Iterator[Server]:
    """The server that the page starts, on free ports."""
    program, *arguments = shlex.split(command("model add").replace(FOLDER_ON_PAGE, str(folder)))
    assert program == ".venv/bin/quire"
    added = run_cli(*arguments)
    assert added.returncode == 0, added.stderr
    program, subcommand, *flags = shlex.split(command("quire serve").replace(FOLDER_ON_PAGE, str(folder)))
    assert (program, subcommand) == (".venv/bin/quire", "serve")
    with serve(*flags, "--openai", "--openai-port", "0") as running:
        yield running


def test_quire_bench_agrees_with_the_server(measured: Server, folder: Path) -> None:
    """An interval of the client contains the server's, and on each side the gaps add up to the rest of the answers.

    How much longer the client's is depends on what else the machine does, so no time is compared with a fixed one.
    """
    program, *arguments = shlex.split(command("quire bench serve").replace(FOLDER_ON_PAGE, str(folder)))
    assert program == ".venv/bin/quire"
    server_at = ("--base-url", measured.grpc, "--metrics", measured.metrics)
    done = run_cli(*arguments, *server_at, "--json", timeout_s=240)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    server = values["server"]
    assert (values["completed"], values["failed"]) == (NUM_REQUESTS, 0)
    assert values["goodput"]["default"]["requests"] == NUM_REQUESTS
    assert [server[f"num_{name}"] for name in ("ttft", "tpot", "e2el")] == [NUM_REQUESTS] * 3
    buckets = {metric.name: metric.buckets for metric in make_metrics() if metric.kind is MetricKind.HISTOGRAM}
    for name in ("ttft", "e2el"):
        assert values[f"mean_{name}_ms"] >= server[f"mean_{name}_ms"]
        for figure in ("median", "p90"):
            ours, theirs = (
                bisect_left(buckets[HISTOGRAMS[name]], of[f"{figure}_{name}_ms"] / 1000) for of in (values, server)
            )
            assert ours >= theirs, f"{figure} {name}"
    assert values["mean_e2el_ms"] < MOST_APART * server["mean_e2el_ms"]
    for side in (values, server):
        gaps_ms = NUM_REQUESTS * (side["mean_e2el_ms"] - side["mean_ttft_ms"])  # from the first token to the last
        fewest, most = MIXED_OUTPUT[0] - 1, MIXED_OUTPUT[1] - 2
        assert gaps_ms / most <= NUM_REQUESTS * side["mean_tpot_ms"] <= gaps_ms / fewest
        num_gaps = gaps_ms / side["mean_itl_ms"]
        if side is server:  # one of each token but the first
            assert server["num_itl"] == values["total_output_tokens"] - NUM_REQUESTS
            assert num_gaps == pytest.approx(server["num_itl"], rel=1e-6)
        else:  # one of each response but the first, and a response may hold several tokens
            assert num_gaps == pytest.approx(round(num_gaps), rel=1e-6)
            assert num_gaps < server["num_itl"] + 0.5


def test_the_model_has_the_page_s_settings(measured: Server, folder: Path) -> None:
    settings = json.loads((folder / "tinypy" / "1" / "model.json").read_text())
    assert settings["stream_interval_ms"] == 0
    assert settings["max_queued_requests"] == 256


def test_genai_perf_s_requests_are_answered(measured: Server) -> None:
    answer = run(measured, text_input="def f(", stream=True, exclude_input_in_output=True, return_token_ids=True,
                 sampling_parameters={"max_tokens": "32", "min_tokens": "32"})  # fmt: skip
    assert len(answer.token_ids) == 32


def test_aiperf_s_template_is_a_request(measured: Server) -> None:
    arguments = shlex.split(command("--endpoint-type template"))
    extra = json.loads(arguments[arguments.index("--extra-inputs") + 1])
    template = jinja2.Environment(autoescape=True).from_string(extra["payload_template"])  # as aiperf does it
    payload = json.loads(template.render(text='print("<a & b>")\n', max_tokens=8))
    assert payload["text_input"] == 'print("<a & b>")\n'
    events = sse(measured, {**payload, "return_token_ids": True})
    token_ids = [event["token_ids"] for event in events]
    assert sum(len(ids) if isinstance(ids, list) else 1 for ids in token_ids) == 8
    assert all(isinstance(event[extra["response_field"]], str) for event in events)


def here(line: str, measured: Server, folder: Path) -> str:
    """A command of the page, of the server that runs here."""
    places: Mapping[str, str] = {
        PEERS_ON_PAGE: str(PEERS), FOLDER_ON_PAGE: str(folder), "127.0.0.1:8001": measured.grpc,
        "127.0.0.1:8000": measured.http, "127.0.0.1:9000": measured.openai,
    }  # fmt: skip
    for there, place in places.items():
        line = line.replace(there, place)
    return line


def test_the_load_scripts_get_all_their_answers(measured: Server) -> None:
    """All three at once; each sees what the others send in the server's figures, so there are at least its own."""
    urls = {"grpc_streams": measured.grpc, "generate_stream": f"http://{measured.http}",
            "openai_chat": f"http://{measured.openai}"}  # fmt: skip
    started = []
    for script, url in urls.items():
        _, *words = shlex.split(command(f"tests/load/{script}.py"))
        arguments = [*words, "--num-prompts", "8", "--base-url", url, "--metrics", measured.metrics, "--json"]
        started.append(subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True))
    for process in started:
        with process:
            values = json.loads(process.communicate(timeout=240)[0])
        assert (process.returncode, values["completed"], values["failed"]) == (0, 8, 0)
        assert values["total_input_tokens"] > 8 * 32
        assert values["total_output_tokens"] > 8 * 16
        assert values["server"]["num_ttft"] >= 8


@dataclass(frozen=True)
class Tool:
    """A load generator of others."""

    peer: str
    words: str
    """Which no other command of the page holds."""
    report: str
    number: str
    """Where the report has the requests that were answered, as a path of keys; likewise the next ones."""
    output_tokens: str
    """Of a request; with vLLM's, of all."""
    ttft: str


TOOLS = [
    Tool("genai-perf", "genai-perf profile", "genai-perf/*/profile_export_genai_perf.json", "request_count.avg",
         "output_sequence_length.avg", "time_to_first_token.avg"),
    Tool("aiperf", "--endpoint-type template", "aiperf/profile_export_aiperf.json", "request_count.avg",
         "output_sequence_length.avg", "time_to_first_token.avg"),
    Tool("aiperf", "--endpoint-type completions", "aiperf-openai/profile_export_aiperf.json", "request_count.avg",
         "output_sequence_length.avg", "time_to_first_token.avg"),
    Tool("guidellm", "guidellm run", "guidellm.json", "benchmarks.0.metrics.request_totals.successful",
         "benchmarks.0.metrics.output_token_count.successful.mean",
         "benchmarks.0.metrics.time_to_first_token_ms.successful.mean"),
    Tool("vllm", "vllm bench serve", "vllm.json", "completed", "total_output_tokens", "mean_ttft_ms"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.words)
def test_a_load_generator_gets_all_its_answers(measured: Server, folder: Path, tool: Tool) -> None:
    if reason := find_peer(PEERS, tool.peer):
        pytest.skip(reason)
    done = subprocess.run(
        ["bash", "-c", here(command(tool.words), measured, folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (written,) = folder.glob(tool.report)
    report = json.loads(written.read_text())

    def figure(path: str) -> float:
        value = report
        for key in path.split("."):
            value = value[int(key) if key.isdecimal() else key]
        return float(value)

    assert figure(tool.number) == NUM_REQUESTS
    num_tokens = figure(tool.output_tokens) / (NUM_REQUESTS if tool.output_tokens.startswith("total") else 1)
    assert 28 < num_tokens < 36
    assert figure(tool.ttft) > 0


def test_what_the_page_installs_can_be_installed() -> None:
    peers = [line.split()[1] for line in COMMANDS if line.startswith("tests/benchmarks/peers/setup.sh ")]
    assert peers == ["genai-perf", "aiperf", "guidellm", "vllm"]
    script = (SCRIPTS / "setup.sh").read_text()
    assert all(f"install_{peer}()" in script for peer in peers)
