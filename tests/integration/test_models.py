"""Model folders that cannot be served, and a server with little memory: refusals, cancellation, disconnection."""

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints import POINTER, edit_json
from support.clients import Answer, ask, http, metric, run, with_client
from support.processes import command_line
from support.serving import CHECKPOINT, Server, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

CONFIG = 'backend: "quire"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
NARROW: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1000, "max_num_seqs": 1, "max_num_batched_tokens": 2,
    "enable_prefix_caching": False,
    # 40 blocks of 16 tokens: layers · keys and values · heads · head size · 4 bytes.
    "kv_cache_memory_bytes": 40 * 16 * 6 * 2 * 4 * 32 * 4,
}  # fmt: skip
"""One request at a time, a prefill of two tokens a step, and room for 640 tokens."""


def add_model(repository: Path, name: str, settings: dict[str, Any] | str) -> Path:
    """A model with a checkpoint folder of its own; links, so that a test can replace single files."""
    folder = repository / name / "1" / "model"
    folder.mkdir(parents=True)
    for file in CHECKPOINT.iterdir():
        (folder / file.name).symlink_to(file)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    text = settings if isinstance(settings, str) else json.dumps({"model": "model", **settings})
    (repository / name / "1" / "model.json").write_text(text)
    return folder


def break_model(repository: Path, name: str) -> None:
    """A model that cannot be served, in the way that its name says."""
    settings = {
        "unknown-key": {"max_num_seq": 4},
        "not-json": "{",
    }.get(name, {})
    folder = add_model(repository, name, settings)
    if name == "no-settings":
        (folder.parent / "model.json").unlink()
    elif name == "no-folder":
        shutil.rmtree(folder)
    elif name == "no-tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    elif name == "truncated":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes((CHECKPOINT / "model.safetensors").read_bytes()[: 2**20])
    elif name == "missing-shard":
        (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif name == "git-lfs-pointer":
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_text(POINTER)
    elif name == "weights-nan":
        tensors = load_file(CHECKPOINT / "model.safetensors")
        tensors["model.norm.weight"][3] = math.nan
        (folder / "model.safetensors").unlink()
        save_file(tensors, folder / "model.safetensors")
    elif name == "unknown-architecture":
        edit_json(folder / "config.json", architectures=["MysteryForCausalLM"], model_type="mystery")


BROKEN = {
    "unknown-key": "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'?",
    "not-json": "model.json is not JSON",
    "no-settings": "model.json is missing",
    "no-folder": "no-folder/1/model",
    "no-tokenizer": "tokenizer",
    "truncated": "model.safetensors",
    "missing-shard": "model-00001-of-00002.safetensors",
    "unknown-architecture": "MysteryForCausalLM",
    "git-lfs-pointer": "model.safetensors is a git-LFS pointer, not the file itself; fetch it with: git lfs pull",
    "weights-nan": "model.safetensors: tensor model.norm.weight holds nan; weights must be finite numbers",
}


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves the model `narrow`, and would load others when told to."""
    repository = tmp_path_factory.mktemp("repository")
    add_model(repository, "narrow", NARROW)
    add_model(repository, "victim", {**NARROW, "replay_on_crash": False})
    for name in BROKEN:
        break_model(repository, name)
    explicit = ("--", "--model-control-mode=explicit", "--load-model=narrow")
    with serve("--model-repository", str(repository), *explicit, step_seconds=0.01) as running:
        yield running


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BROKEN)
def test_model_that_cannot_be_served_is_refused_with_one_clear_line(small_server: Server, name: str) -> None:
    status, answer = http(small_server, f"/v2/repository/models/{name}/load")
    assert status != 200
    reason, _, traceback = answer["error"].partition("At:")
    assert BROKEN[name] in reason
    assert "Traceback" not in answer["error"]
    assert len(traceback.strip(" \n;").splitlines()) <= 1  # the stub adds where the error was raised
    assert run(small_server, model="narrow", text_input="x", max_tokens=1).text != ""


# -- what can never fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"input_ids": [5] * 700, "max_tokens": 1}, "input_ids"),
        ({"input_ids": [5] * 600, "max_tokens": 300}, "max_tokens"),
    ],
)
def test_request_that_can_never_fit_is_refused(small_server: Server, said: dict[str, Any], name: str) -> None:
    answer = run(small_server, model="narrow", **said)
    assert answer.message.startswith(f"{name}: a prompt of")
    assert "KV cache" in answer.message
    assert run(small_server, model="narrow", text_input="x", max_tokens=1).text != ""


# -- cancellation -----------------------------------------------------------------------------------------------------

LONG: dict[str, Any] = {"input_ids": [7, 8, 9], "max_tokens": 600, "ignore_eos": True, "stream": True}
LONG_PREFILL: dict[str, Any] = {"input_ids": [11] * 600, "max_tokens": 4, "stream": True}


def value(server: Server, name: str, **labels: str) -> float:
    return metric(server, name, model="narrow", **labels)


def aborted(server: Server) -> float:
    return value(server, "quire_requests_total", outcome="abort")


def is_idle(server: Server) -> bool:
    return (
        value(server, "quire_requests_running") == 0
        and value(server, "quire_requests_waiting", reason="queue") == 0
        and value(server, "quire_kv_blocks", state="used") == 0
    )


@pytest.fixture
def num_aborted(small_server: Server) -> float:
    """Requests aborted so far, of an idle server."""
    wait_until(lambda: is_idle(small_server), "the server is idle")
    return aborted(small_server)


def assert_freed(server: Server, aborts: float) -> None:
    """All blocks are free again, and `aborts` requests were aborted in all: none of them ran to its end."""
    wait_until(lambda: aborted(server) == aborts and is_idle(server), "requests are aborted, blocks are free")


async def until(is_true: Any, what: str) -> None:
    await asyncio.to_thread(wait_until, is_true, what)


async def cancel(task: "asyncio.Task[Answer]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def decoding(server: Server) -> None:
    """Wait until the only request gets tokens."""
    await until(lambda: value(server, "quire_requests_running") == 1, "it runs")
    tokens = value(server, "quire_generation_tokens_total")
    await until(lambda: value(server, "quire_generation_tokens_total") > tokens, "tokens come")


@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_in_decode(small_server: Server, num_aborted: float, stream: bool) -> None:
    async def work(client: grpc_aio.InferenceServerClient) -> None:
        task = asyncio.create_task(ask(client, model="narrow", **{**LONG, "stream": stream}))
        await decoding(small_server)
        await cancel(task)

    asyncio.run(with_client(small_server, work))
    assert_freed(small_server, num_aborted + 1)


def test_cancelled_in_prefill(small_server: Server, num_aborted: float) -> None:
    async def work(client: grpc_aio.InferenceServerClient) -> float:
        task = asyncio.create_task(ask(client, model="narrow", **LONG_PREFILL))
        await until(lambda: value(small_server, "quire_requests_running") == 1, "the prefill begins")
        tokens = value(small_server, "quire_generation_tokens_total")
        await cancel(task)
        return tokens

    tokens = asyncio.run(with_client(small_server, work))
    assert_freed(small_server, num_aborted + 1)
    assert value(small_server, "quire_generation_tokens_total") == tokens


def test_cancelled_while_waiting(small_server: Server, num_aborted: float) -> None:
    def waiting(count: int) -> bool:
        return value(small_server, "quire_requests_waiting", reason="queue") == count

    async def work(client: grpc_aio.InferenceServerClient) -> None:
        running = asyncio.create_task(ask(client, model="narrow", **LONG))
        await until(lambda: value(small_server, "quire_requests_running") == 1, "the first runs")
        tasks = [asyncio.create_task(ask(client, model="narrow", **LONG)) for _ in range(3)]
        await until(lambda: waiting(3), "the others wait")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: waiting(0), "nobody waits")
        assert value(small_server, "quire_requests_running") == 1
        assert not running.done()
        await cancel(running)

    asyncio.run(with_client(small_server, work))
    assert_freed(small_server, num_aborted + 4)


KILLED_CLIENT = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from support.clients import ask
from tritonclient.grpc import aio

async def main():
    async with aio.InferenceServerClient(sys.argv[2]) as client:
        tell = lambda response: print("response", flush=True)
        await ask(client, model="narrow", on_response=tell, **json.loads(sys.argv[3]))

asyncio.run(main())
"""


def test_client_process_is_killed(small_server: Server, num_aborted: float) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", KILLED_CLIENT, str(Path(__file__).parents[1]), small_server.grpc, json.dumps(LONG)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    with client:
        try:
            assert client.stdout.readline() == "response\n"
        finally:
            client.kill()
    assert_freed(small_server, num_aborted + 1)


def test_http_stream_is_dropped(small_server: Server, num_aborted: float) -> None:
    host, _, port = small_server.http.rpartition(":")
    body = json.dumps(LONG).encode()
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(
            b"POST /v2/models/narrow/generate_stream HTTP/1.1\r\nHost: test\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        received = b""
        while b"text_output" not in received:
            chunk = connection.recv(65536)
            assert chunk
            received += chunk
    assert_freed(small_server, num_aborted + 1)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_count_what_happened(small_server: Server) -> None:
    wait_until(lambda: is_idle(small_server), "the server is idle")
    counters = {
        "quire_prompt_tokens_total": 5, "quire_generation_tokens_total": 7,
        "quire_time_to_first_token_seconds_count": 1, "quire_time_per_output_token_seconds_count": 1,
        "quire_e2e_request_latency_seconds_count": 1, "quire_request_queue_time_seconds_count": 1,
    }  # fmt: skip
    by_class = [name for name in counters if "token_seconds" in name or "e2e" in name]
    labels = {name: {"slo": "default"} if name in by_class else {} for name in counters}
    before = {name: value(small_server, name, **labels[name]) for name in counters}
    done, refused = (value(small_server, "quire_requests_total", outcome=name) for name in ("length", "rejected"))
    run(small_server, model="narrow", input_ids=[5] * 5, max_tokens=7, ignore_eos=True)
    assert run(small_server, model="narrow", input_ids=[]).message != ""
    for name, growth in counters.items():
        wait_until(
            lambda name=name, growth=growth: value(small_server, name, **labels[name]) == before[name] + growth, name
        )
    wait_until(lambda: value(small_server, "quire_requests_total", outcome="length") == done + 1, "length")
    wait_until(lambda: value(small_server, "quire_requests_total", outcome="rejected") == refused + 1, "rejected")


def test_metrics_show_the_present(small_server: Server) -> None:
    assert value(small_server, "quire_engine_up") == 1
    run(small_server, model="narrow", text_input="x", max_tokens=1)
    wait_until(lambda: value(small_server, "quire_kv_blocks", state="free") == 40, "all blocks are free")
    blocks = {state: value(small_server, "quire_kv_blocks", state=state) for state in ("used", "cached", "free")}
    assert blocks == {"used": 0, "cached": 0, "free": 40}

    async def work(client: grpc_aio.InferenceServerClient) -> None:
        task = asyncio.create_task(ask(client, model="narrow", **LONG))
        await until(lambda: value(small_server, "quire_requests_running") == 1, "it runs")
        await until(lambda: value(small_server, "quire_kv_cache_usage_ratio") > 0, "blocks are used")
        await cancel(task)

    asyncio.run(with_client(small_server, work))
    wait_until(lambda: value(small_server, "quire_kv_cache_usage_ratio") == 0, "blocks are free")
    wait_until(lambda: value(small_server, "quire_requests_running") == 0, "nothing runs")


# -- processes --------------------------------------------------------------------------------------------------------


def engine_pids(server: Server) -> set[int]:
    return {pid for pid in server.run_id.processes() if "quire_engine.core.core_process" in command_line(pid)}


def test_models_that_failed_to_load_left_nothing_behind(small_server: Server) -> None:
    """Each failed load had a stub, and some an engine process."""
    wait_until(lambda: len(engine_pids(small_server)) == 1, "only the engine of `narrow` is left")


def test_without_replay_death_of_the_engine_is_told_to_everybody(small_server: Server) -> None:
    others = engine_pids(small_server)
    status, answer = http(small_server, "/v2/repository/models/victim/load")
    assert status == 200, answer
    (pid,) = engine_pids(small_server) - others

    async def work(client: grpc_aio.InferenceServerClient) -> Answer:
        first = asyncio.Event()
        task = asyncio.create_task(ask(client, model="victim", on_response=lambda response: first.set(), **LONG))
        await first.wait()
        os.kill(pid, signal.SIGKILL)
        return await task

    assert "the engine process was killed by SIGKILL" in asyncio.run(with_client(small_server, work)).message
    early = run(small_server, model="victim", text_input="x", max_tokens=1)
    assert early.error is None or "being started again" in early.message
    assert run(small_server, model="narrow", text_input="x", max_tokens=1).text != ""
    wait_until(lambda: metric(small_server, "quire_engine_restarts_total", model="victim") == 1, "it is up again")
    assert run(small_server, model="victim", text_input="x", max_tokens=1).text != ""
    status, answer = http(small_server, "/v2/repository/models/victim/unload")
    assert status == 200, answer


def test_unloading_ends_the_engine(small_server: Server) -> None:
    """Last: it takes the model away."""
    wait_until(lambda: len(engine_pids(small_server)) == 1, "only the engine of `narrow` is left")
    assert http(small_server, "/v2/repository/models/narrow/unload")[0] == 200
    wait_until(lambda: not engine_pids(small_server), "the engine is gone")
