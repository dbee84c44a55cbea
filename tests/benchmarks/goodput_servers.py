"""Goodput of whole servers: ours, first come, first served and scheduling for SLOs, and vLLM's CPU build.

    python tests/benchmarks/goodput_servers.py [--model FOLDER] [--seconds 60] [--multiples 0.8 1.2 2]
                                               [--burstiness 1 0.25]

Each server is alone on the machine with the client, `quire bench serve` through OpenAI's API, and gets the same
requests at the same times (32 to 255 tokens in, 16 to 127 out). The rate that saturates is measured at ours, first
come, first served, with all requests at once; the objectives of three classes follow from it: chat (half of the
requests; a first token soon, and steadily more), code (three in ten; later) and batch (the end at some time). A request
that is refused is not good. vLLM is passed over where tests/benchmarks/peers/setup.sh has not installed it.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.ports import free_port  # noqa: E402
from support.serving import run_cli, serve  # noqa: E402

NAME = "measured"
WEIGHTS = {"chat": 5, "code": 3, "batch": 2}
MAX_MODEL_LEN = 1024
START_SECONDS = 300.0


def objectives(rate: float, tpot_ms: float) -> dict[str, dict[str, Any]]:
    """The setting `slo` of a server that saturates at `rate` requests per second with `tpot_ms` per output token."""
    return {
        "chat": {"ttft_ms": round(3000 / rate), "tpot_ms": round(1.5 * tpot_ms, 1)},
        "code": {"ttft_ms": round(11_000 / rate), "tpot_ms": round(2.5 * tpot_ms, 1)},
        "batch": {"e2e_ms": round(300_000 / rate), "on_overload": "best_effort"},
    }


@contextmanager
def quire(model: Path, **settings: Any) -> Iterator[str]:
    """The URL of our gateway, in front of a tritonserver with this model."""
    with tempfile.TemporaryDirectory(prefix="quire-goodput-") as repository:
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        added = run_cli("model", "add", str(model), "--name", NAME, "--model-repository", repository, *words)
        assert added.returncode == 0, added.stderr
        with serve("--model-repository", repository, "--openai", "--openai-port", "0") as server:
            yield f"http://{server.openai}"


@contextmanager
def vllm(model: Path, program: Path) -> Iterator[str]:
    """The URL of vLLM's own server, with all cores for its engine and, like ours, without a prefix cache."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with free_port() as port, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [program, "serve", model, "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
             "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            end = time.monotonic() + START_SECONDS
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"vLLM did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(1.0)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def load(url: str, model: Path, *words: str) -> dict[str, Any]:
    """What `quire bench serve` measured."""
    done = run_cli("bench", "serve", "--backend", "openai", "--base-url", url, "--model", NAME,
                   "--tokenizer", str(model), "--json", *words)  # fmt: skip
    assert done.stdout, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def mixture(slo: dict[str, dict[str, Any]]) -> list[str]:
    """The arguments for three classes and what is good for each."""
    words = []
    for name, weight in WEIGHTS.items():
        good = ",".join(f"{key.replace('e2e_', 'e2el_').removesuffix('_ms')}:{value}"
                        for key, value in slo[name].items() if key.endswith("_ms"))  # fmt: skip
        words += ["--slo-class", f"{name}:{weight}", "--goodput", f"{name}={good}"]
    return words


def measure(
    servers: dict[str, Callable[[], AbstractContextManager[str]]], args: argparse.Namespace,
    slo: dict[str, dict[str, Any]], rate: float,
) -> None:  # fmt: skip
    """One server after the other, all loads; a line for each."""
    for label, start in servers.items():
        with start() as url:
            load(url, args.model, "--num-prompts", "16")  # warms it up
            for burstiness in args.burstiness:
                for multiple in args.multiples:
                    words = ["--request-rate", f"{multiple * rate:.3f}", "--burstiness", f"{burstiness:g}",
                             "--num-prompts", str(round(multiple * rate * args.seconds)), *mixture(slo)]  # fmt: skip
                    values = load(url, args.model, *words)
                    classes = "  ".join(f"{name} {one['good'] / one['requests']:4.0%}"
                                        for name, one in values["goodput"].items())  # fmt: skip
                    kind = "Poisson" if burstiness == 1 else f"bursts ({burstiness:g})"
                    print(f"{label:12} {kind:14} {multiple:3} x   {values['request_goodput']:6.2f} good of "
                          f"{multiple * rate:6.2f} requests/s   {classes}   {values['output_throughput']:6.0f} tok/s",
                          flush=True)  # fmt: skip


def main() -> None:
    """Entry point."""
    from harness.engines import cache_folder, find_peer  # tests import this file as part of a package

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "model_repository/tinypy/1/model")
    parser.add_argument("--seconds", type=float, default=60.0, help="during which requests come, in each run")
    parser.add_argument("--multiples", type=float, nargs="+", default=[0.8, 1.2, 2.0])
    parser.add_argument("--burstiness", type=float, nargs="+", default=[1.0, 0.25])
    args = parser.parse_args()
    plain = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
    with quire(args.model, **plain) as url:
        load(url, args.model, "--num-prompts", "16")
        full = load(url, args.model, "--num-prompts", "256")
    rate, tpot_ms = full["request_throughput"], full["median_tpot_ms"]
    slo = objectives(rate, tpot_ms)
    print(f"ours saturates at {rate:.2f} requests/s, with {tpot_ms:.1f} ms per output token; {slo}", flush=True)
    servers: dict[str, Callable[[], AbstractContextManager[str]]] = {
        "Quire, fcfs": partial(quire, args.model, slo=slo, **plain),
        "Quire, slo": partial(quire, args.model, slo=slo, scheduling_policy="slo", **plain),
    }
    peers = Path(os.environ.get("QUIRE_BENCH_PEERS") or cache_folder() / "peers")
    if reason := find_peer(peers, "vllm"):
        print(reason, file=sys.stderr)
    else:
        servers["vLLM"] = partial(vllm, args.model, peers / "vllm" / "bin" / "vllm")
    measure(servers, args, slo, rate)


if __name__ == "__main__":
    main()
