"""The engines that are compared, and one run of one of them in a fresh process."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .processes import peak_memory_bytes, process_tree

__all__ = [
    "ENGINES", "SCRIPTS", "Engine", "Job", "Run", "RunError", "cache_folder", "environment_of", "find_peer", "prepare",
    "run", "runnable",
]  # fmt: skip

SCRIPTS = Path(__file__).resolve().parents[1] / "peers"
RUN_SECONDS = 1200.0
"""A run that takes longer has failed."""
EXIT_SECONDS = 20.0
SHARED_MEMORY = Path("/dev/shm")
REASON_LENGTH = 200
DROPPED_VARIABLES = ("OMP_NUM_THREADS", "LD_PRELOAD", "VIRTUAL_ENV", "PYTHONHOME", "VLLM_CPU_OMP_THREADS_BIND")
"""Each engine decides itself what these are; what the caller has set would hold for some of them only."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine with one choice of settings."""

    name: str
    label: str
    """In tables and plots."""
    script: str
    variant: str
    precision: str
    """What is compared with what: `bf16`, `int8` or `int4`."""
    peer: str | None = None
    """Name of its environment; None: ours, in this one."""
    file_of: str | None = None
    """Name of the engine whose converted checkpoint it reads."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings, which its script knows."""


ENGINES = [
    Engine(name="quire", label="Quire, bf16", script="quire.py", variant="bf16", precision="bf16"),
    Engine(name="quire-int8", label="Quire, int8", script="quire.py", variant="int8", precision="int8"),
    Engine(name="quire-int4", label="Quire, int4", script="quire.py", variant="int4", precision="int4"),
    Engine(name="quire-q4_0", label="Quire, GGUF Q4_0", script="quire.py", variant="q4_0", precision="int4",
           file_of="llamacpp-q4_0"),
    Engine(name="quire-q4_k_m", label="Quire, GGUF Q4_K_M", script="quire.py", variant="q4_k_m", precision="int4",
           file_of="llamacpp-q4_k_m"),
    Engine(name="quire-gguf", label="Quire, GGUF as published", script="quire.py", variant="gguf", precision="int4"),
    Engine(name="vllm", label="vLLM CPU, default", script="vllm_cpu.py", variant="default", precision="bf16",
           peer="vllm"),
    Engine(name="vllm-all-cores", label="vLLM CPU, all cores", script="vllm_cpu.py", variant="all_cores",
           precision="bf16", peer="vllm"),
    Engine(name="openvino", label="OpenVINO GenAI, bf16", script="openvino_genai_cpu.py", variant="fp16",
           precision="bf16", peer="openvino"),
    Engine(name="openvino-int8", label="OpenVINO GenAI, int8", script="openvino_genai_cpu.py", variant="int8",
           precision="int8", peer="openvino"),
    Engine(name="openvino-int4", label="OpenVINO GenAI, int4", script="openvino_genai_cpu.py", variant="int4",
           precision="int4", peer="openvino"),
    Engine(name="llamacpp", label="llama.cpp, BF16", script="llama_cpp.py", variant="bf16", precision="bf16",
           peer="llamacpp"),
    Engine(name="llamacpp-q8", label="llama.cpp, Q8_0", script="llama_cpp.py", variant="q8_0", precision="int8",
           peer="llamacpp"),
    Engine(name="llamacpp-q4_0", label="llama.cpp, Q4_0", script="llama_cpp.py", variant="q4_0", precision="int4",
           peer="llamacpp"),
    Engine(name="llamacpp-q4_k_m", label="llama.cpp, Q4_K_M", script="llama_cpp.py", variant="q4_k_m",
           precision="int4", peer="llamacpp"),
    Engine(name="llamacpp-gguf", label="llama.cpp, GGUF as published", script="llama_cpp.py", variant="gguf",
           precision="int4", peer="llamacpp"),
    Engine(name="transformers", label="transformers, batches of 16", script="transformers_cpu.py",
           variant="static16", precision="bf16", peer="transformers"),
    Engine(name="transformers-cb", label="transformers, continuous batching", script="transformers_cpu.py",
           variant="continuous", precision="bf16", peer="transformers"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all engines of a comparison are told."""

    model: Path
    workloads: Sequence[str]
    cache: Path
    peers: Path
    threads: int
    requests: int = 64
    prefix_caching: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """More settings of ours, as in `model.json`; the others have their own."""
    outputs: bool = False
    """Keep the token ids of the outputs."""

    def command(self, engine: Engine) -> list[str]:
        """The command line of a run."""
        python = self.peers / engine.peer / "bin" / "python" if engine.peer else Path(sys.executable)
        command = [str(python), str(SCRIPTS / engine.script), str(self.model), "--variant", engine.variant]
        command += ["--workloads", *self.workloads, "--threads", str(self.threads)]
        settings = {**engine.settings, **(self.settings if engine.peer is None else {})}
        command += ["--converted", str(self.cache / "converted"), "--settings", json.dumps(settings)]
        command += ["--requests", str(self.requests)]
        return command + ["--prefix-caching"] * self.prefix_caching + ["--outputs"] * self.outputs


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one engine did with one workload."""

    engine: str
    version: str
    model: str
    workload: str
    seconds: float
    requests: int
    input_tokens: int
    output_tokens: int
    load_seconds: float
    """Making the engine, imports not included."""
    ready_seconds: float
    """From the start of the process until it is ready for a request."""
    peak_memory_bytes: int = 0
    """Of the process with all its children, until the end of the last workload."""
    round: int = 0
    outputs: list[list[int]] | None = None
    """Token ids, where the job keeps them."""

    @property
    def rate(self) -> float:
        """Output tokens per second; prompt tokens per second if the outputs have one token each."""
        return (self.input_tokens if self.output_tokens == self.requests else self.output_tokens) / self.seconds


class RunError(Exception):
    """An engine did not do what it was asked for; the message says why, and where its output is."""


def cache_folder() -> Path:
    """Where checkpoints and environments are kept: `QUIRE_BENCH_CACHE`, or a folder in the user's cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("QUIRE_BENCH_CACHE") or base / "quire-bench")


def find_peer(peers: Path, name: str) -> str | None:
    """Why a peer cannot be run, in one line; None if it can."""
    if (peers / name / ".installed").exists():
        return None
    script = os.path.relpath(SCRIPTS / "setup.sh")
    return f"{name} is not installed in {peers / name}; {script} {name} {peers / name} installs it"


def prepare(engine: Engine, job: Job, log: Path) -> None:
    """Convert the checkpoint for an engine that needs it, once, and find out whether it takes the settings.

    Raises:
        RunError: it could not be done, or the peer that does it is not installed.
    """
    if engine.peer and (reason := find_peer(job.peers, engine.peer)):
        raise RunError(reason)
    for other in ENGINES:
        if other.name == engine.file_of:
            prepare(other, job, log)
    with log.open("w") as stream:
        done = subprocess.run(
            [*job.command(engine), "--prepare"], env=environment_of(engine.peer, job.peers), stdin=subprocess.DEVNULL,
            stdout=stream, stderr=stream,
        )  # fmt: skip
    if done.returncode != 0:
        raise RunError(_explain(engine, f"cannot run {job.model.name}", log))


def runnable(engines: Iterable[Engine], job: Job, logs: Path, say: Callable[[str], None]) -> list[Engine]:
    """Prepare engines; returns those that can run.

    Args:
        logs: folder for what they print.
        say: gets the reasons why others cannot run.
    """
    tried = [(engine, _why_not(engine, job, logs)) for engine in engines]
    for reason in dict.fromkeys(reason for _, reason in tried if reason):
        say(reason)
    return [engine for engine, reason in tried if reason is None]


def _why_not(engine: Engine, job: Job, logs: Path) -> str | None:
    try:
        prepare(engine, job, logs / f"prepare-{engine.name}-{job.model.name}.log")
    except RunError as error:
        return str(error)
    return None


def run(engine: Engine, job: Job, log: Path) -> list[Run]:
    """One run of one engine in a fresh process.

    Args:
        log: what the engine prints.

    Raises:
        RunError: it failed, or took too long.
    """
    start = time.perf_counter()
    with log.open("w") as stream:
        process = subprocess.Popen(
            job.command(engine), env=environment_of(engine.peer, job.peers), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=stream, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    ready: dict[str, Any] = {}
    ready_seconds = 0.0
    runs = []
    patience = 0.0
    try:
        for event in _events(process, start + RUN_SECONDS):
            kind = event.pop("event")
            if kind == "ready":
                ready, ready_seconds = event, time.perf_counter() - start
            elif kind == "run":
                runs.append(
                    Run(engine=engine.name, model=job.model.name, **ready, ready_seconds=ready_seconds, **event)
                )
            else:
                peak = peak_memory_bytes(process.pid)
                patience = EXIT_SECONDS
                return [replace(one, peak_memory_bytes=peak) for one in runs]
        raise RunError(_explain(engine, "ended too early, or took too long", log))
    finally:
        _end(process, patience)


def _events(process: subprocess.Popen[bytes], deadline: float) -> Iterator[dict[str, Any]]:
    """What it says, until it ends or the time is up."""
    assert process.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.perf_counter() < deadline:
            if not selector.select(timeout=1.0):
                if process.poll() is not None:  # but what it has started holds the pipe open
                    return
                continue
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from map(json.loads, lines)


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Let it end by itself for so many seconds, then end it and whatever it has started."""
    assert process.stdin is not None
    assert process.stdout is not None
    pids = process_tree(process.pid)
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in pids:  # Intel's OpenMP leaves these behind in processes that are killed, as vLLM kills its own
        for file in SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
            file.unlink(missing_ok=True)


def environment_of(peer: str | None, peers: Path) -> dict[str, str]:
    """The variables of a peer's process, or of one of ours."""
    dropped = set(DROPPED_VARIABLES) | ({"PYTHONPATH"} if peer else set())
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    if peer == "vllm":
        environment["LD_PRELOAD"] = ":".join(_vllm_libraries(peers / "vllm"))
    return environment


def _vllm_libraries(folder: Path) -> list[str]:
    """What vLLM's documentation wants preloaded, as far as it is there: tcmalloc and Intel's OpenMP."""
    places = [folder / "tcmalloc" / "usr" / "lib", Path("/usr/lib")]
    tcmalloc = [str(path) for place in places for path in sorted(place.glob("*/libtcmalloc_minimal.so.4"))]
    openmp = folder / "lib" / "libiomp5.so"
    return tcmalloc[:1] + [str(openmp)] * openmp.exists()


def _explain(engine: Engine, what: str, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return f"{engine.name}: {what}: {last[:REASON_LENGTH]} (all of it in {log})"
