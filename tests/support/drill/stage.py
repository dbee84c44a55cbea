"""What the drill plays on: a server with two models, its processes, and its probes, which are held to the truth.

::

    steady     two ranks; its processes are killed and stopped, but it is never unloaded
    changing   reloaded with other settings, with one or two instances, unloaded and loaded
"""

import json
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire_engine.system import process_state
from support.clients import http, run, scrape
from support.drill.streams import Streams
from support.processes import command_line, is_gone, parent
from support.serving import CHECKPOINT, Server, wait_until

__all__ = [
    "CHANGING", "EXPLICIT", "MODELS", "RECOVERY_DEADLINE_S", "STEADY", "Stage", "write_instances", "write_repository",
    "write_settings",
]  # fmt: skip

STEADY, CHANGING = "steady", "changing"
MODELS = [STEADY, CHANGING]
EXPLICIT = ("--", "--model-control-mode=explicit", *(f"--load-model={model}" for model in MODELS))
"""Arguments of `quire serve` for it."""
TRUTH_DEADLINE_S = 20.0
"""A probe that is wrong for longer has not noticed at all. How soon it did is printed, not judged: see `lags`."""
RECOVERY_DEADLINE_S = 120.0

_SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 48 << 20, "max_model_len": 1024}
_MODULES = {
    "core": "quire_engine.core.core_process",
    "worker": "quire_engine.worker.worker_process",
    "compiler": "quire_engine.structured_output.compiler",
    "stub": "triton_python_backend_stub",
}


def write_repository(folder: Path) -> None:
    """Both models. Their weights are links, which an event may take away without touching the demo model."""
    for model, settings in ((STEADY, {"tensor_parallel_size": 2}), (CHANGING, {})):
        checkpoint = folder / model / "1" / "checkpoint"
        checkpoint.mkdir(parents=True)
        for file in CHECKPOINT.iterdir():
            (checkpoint / file.name).symlink_to(file)
        write_settings(folder, model, **settings)
        write_instances(folder, model, 1)


def write_settings(repository: Path, model: str, **changes: Any) -> None:
    """The model's `model.json`, as it is but for these changes."""
    file = repository / model / "1" / "model.json"
    settings = json.loads(file.read_text()) if file.exists() else {"model": "checkpoint", **_SETTINGS}
    file.write_text(json.dumps({**settings, **changes}))


def write_instances(repository: Path, model: str, count: int) -> None:
    """The model's `config.pbtxt`, with so many instances."""
    text = f'backend: "quire"\ninstance_group [ {{ count: {count} kind: KIND_MODEL }} ]\n'
    (repository / model / "config.pbtxt").write_text(text)


class Stage:
    """A running server under mixed streams.

    Args:
        server: started with `EXPLICIT` and the repository.
        repository: as `write_repository` made it.
        streams: its load, not started yet.
    """

    def __init__(self, server: Server, repository: Path, streams: Streams) -> None:
        self.server, self.repository, self.streams = server, repository, streams
        self.instances = Counter(MODELS)
        """Of each model that is loaded."""
        self.lags: dict[str, list[float]] = defaultdict(list)
        """Probe → seconds that it took each time to tell the truth."""
        self.memory: list[dict[str, int]] = []
        """After each event: MiB by kind of process."""

    # -- processes ------------------------------------------------------------------------------------------------

    def processes(self, kind: str, model: str | None = None) -> list[int]:
        """Living processes of a kind: `tritonserver`, `stub`, `core`, `worker` or `compiler`; of one model, or all."""
        pids = [pid for pid in self.server.run_id.processes() if not is_gone(pid)]
        if kind == "tritonserver":
            stats = ((pid, process_state.process_stat(pid)) for pid in pids)
            return [pid for pid, stat in stats if stat and stat.name == kind]
        return [pid for pid in pids if _MODULES[kind] in command_line(pid) and model in (None, self.model_of(pid))]

    def model_of(self, pid: int) -> str | None:
        """Whose stub a process is or descends from."""
        while pid > 1:
            words = command_line(pid)
            if _MODULES["stub"] in words:
                return next((model for model in MODELS if f"/{model}/" in words), None)
            pid = parent(pid)
        return None

    def take_memory(self) -> None:
        """Note what each kind of process holds."""
        kinds = {"tritonserver": self.processes("tritonserver"), "serve": [self.server.process.pid]}
        kinds.update({kind: self.processes(kind) for kind in _MODULES})
        self.memory.append({kind: sum(map(_pss_mib, pids)) for kind, pids in kinds.items()})

    # -- requests -------------------------------------------------------------------------------------------------

    def repository_call(self, model: str, call: str) -> None:
        """`load` or `unload`; returns once the server has done it."""
        status, answer = http(self.server, f"/v2/repository/models/{model}/{call}", {})
        assert status == 200, f"{call} of {model}: {answer}"

    def is_served(self, model: str) -> bool:
        """Whether a request gets an answer."""
        try:
            return run(self.server, model=model, text_input="x", max_tokens=1).error is None
        except TimeoutError:
            return False

    # -- truth ----------------------------------------------------------------------------------------------------

    def wait_until_served(self) -> None:
        """Wait until every loaded model answers and the old ones have ended, then until each probe says so."""
        for model in +self.instances:
            wait_until(lambda model=model: self.is_served(model), f"{model} is served again", RECOVERY_DEADLINE_S)
        # What a reload replaces first brings its requests to their ends.
        wait_until(self.nothing_is_left_over, "each instance has one stub and one core", RECOVERY_DEADLINE_S)
        self.expect_truth("up", {"health": self.is_healthy, "ready": self.is_ready, "quire_engine_up": self.says_up})

    def expect_down(self) -> None:
        """The server cannot serve all its models at this moment, and goes on so until this returns."""
        self.expect_truth("down", {"health": lambda: not self.is_healthy()})

    def expect_truth(self, which: str, probes: dict[str, Callable[[], bool]]) -> None:
        """Wait until each probe says what is true from now on, and note how long it took."""
        since = time.monotonic()
        for name, is_true in probes.items():
            wait_until(is_true, f"{name} says {which}", TRUTH_DEADLINE_S)
            self.lags[f"{name} {which}"].append(time.monotonic() - since)

    def is_healthy(self) -> bool:
        """What `quire serve` says of itself."""
        return _status(f"http://{self.server.health}/health") == 200

    def is_ready(self) -> bool:
        """What tritonserver says of its models."""
        return _status(f"http://{self.server.http}/v2/health/ready") == 200

    def says_up(self) -> bool:
        """Whether there is a `quire_engine_up` of each instance, and all are 1."""
        ups = Counter(sample.labels["model"] for sample in self._ups() if sample.value == 1)
        return ups == self.instances and all(sample.value == 1 for sample in self._ups())

    def nothing_is_left_over(self) -> bool:
        """Whether there are as many stubs and engine cores as loaded instances."""
        return all(Counter(map(self.model_of, self.processes(kind))) == self.instances for kind in ("stub", "core"))

    def state(self) -> str:
        """What is wanted and what is there, for whom something failed."""
        there = {f"{kind} of {model}": self.processes(kind, model) for kind in ("stub", "core") for model in MODELS}
        ups = [(sample.labels, sample.value) for sample in self._ups()]
        return f"wanted {dict(self.instances)}; there are {there}, quire_engine_up {ups}"

    def _ups(self) -> list[Any]:
        return [sample for sample in scrape(self.server) if sample.name == "quire_engine_up"]


def _status(url: str) -> int:
    """The status of a GET; 0 without an answer in a second."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def _pss_mib(pid: int) -> int:
    """Memory of a process, shared pages by share."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next(int(line.split()[1]) // 1024 for line in text.splitlines() if line.startswith("Pss:"))
