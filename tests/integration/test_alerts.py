"""Every alert fires of its cause, and of nothing less: a real server is struck, flooded and stopped, and a real
Prometheus with the repository's rules looks on.

Durations of the rules are divided by `FACTOR`, thresholds are not; see `support.prometheus`. So an engine counts
as down after two seconds here, which is less than a restart may take: tests that kill engines do not mind that alert.
"""

import asyncio
import contextlib
import ctypes
import http.server as http_server
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.background_load import Load
from support.clients import snapshot
from support.event_loop import running_loop
from support.faults import put_fault
from support.prometheus import FILES, Prometheus, alertmanager, prometheus
from support.serving import CHECKPOINT, SMALL, Server, add_model, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKEN = "a-token-for-the-tests"
FACTOR = 60
"""A minute is a second."""
BLOCK_BYTES = 6 * 2 * 4 * 32 * 16 * 4
"""Layers, keys and values, heads, head size, tokens, bytes."""
MODELS: dict[str, dict[str, Any]] = {
    "alone": {
        "kv_cache_memory_bytes": 96 * BLOCK_BYTES,
        "max_num_seqs": 32,
        "slo": {"default": {"ttft_ms": 4000}, "other": {}},
    },  # full answers of `test_more_requests…` take 13 blocks each: a quarter of them fit
    "pair": {"tensor_parallel_size": 2},
}
QUIET_SECONDS = 600 / FACTOR
CRASH_LOOP_SECONDS = 600 / (FACTOR / 10)
"""Three restarts have to fit in, on a slow machine as well."""
FIRES_SECONDS = 60.0
RESTART_SECONDS = 120.0
"""The deadline of a request that waits for the next engine."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What the tests share."""

    server: Server
    prometheus: Prometheus
    loop: asyncio.AbstractEventLoop
    """Where clients run."""
    checkpoint: Path
    """A folder that can be taken away."""
    fault_file: Path
    hooks: "Webhook | None"
    fired_in_quiet: list[dict[str, str]] = field(default_factory=list)

    def firing(self, name: str, **labels: str) -> list[dict[str, Any]]:
        """Alerts of a name and with these labels that are firing now."""
        return [
            alert
            for alert in self.prometheus.alerts()
            if alert["state"] == "firing" and alert["labels"].items() >= {"alertname": name, **labels}.items()
        ]

    def wait_until_fires(self, name: str, *, cause_at: float, **labels: str) -> dict[str, Any]:
        """Wait for an alert, look at what it says, and say how long after its cause it came."""
        found: list[dict[str, Any]] = []

        def fires() -> bool:
            found[:] = self.firing(name, **labels)
            return bool(found)

        try:
            wait_until(fires, f"{name} {labels} fires", FIRES_SECONDS)
        except AssertionError as error:
            series = re.findall(r"\bquire[\w:]*", RULES[name]["expr"])
            seen = [self.prometheus.query(f'{{__name__="{one}", model="{labels.get("model", "")}"}}') for one in series]
            engines = {model: snapshot(self.server, model, TOKEN)["engine"] for model in MODELS}
            raise AssertionError(f"{error}; {self.prometheus.alerts()}, {seen}, {engines}") from None
        print(f"{name} fires within {time.monotonic() - cause_at:.1f} s of its cause")
        (alert,) = found
        rule = RULES[name]
        assert alert["labels"]["severity"] == rule["labels"]["severity"]
        assert alert["annotations"]["runbook"] == rule["annotations"]["runbook"]
        for text in alert["annotations"].values():
            assert "{{" not in text
            assert "<no value>" not in text
        for inhibition in INHIBITIONS:
            if any(re.fullmatch(one, name) for one in alertnames(inhibition)):
                assert alert["labels"].keys() >= set(inhibition["equal"]), "or else what is down could not silence it"
        return alert

    def wait_until_over(self, name: str, **labels: str) -> None:
        wait_until(lambda: not self.firing(name, **labels), f"{name} {labels} fires no more", FIRES_SECONDS)


RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}


INHIBITIONS = yaml.safe_load((FILES / "alertmanager.yml").read_text(encoding="utf-8"))["inhibit_rules"]


def alertnames(inhibition: dict[str, Any]) -> list[str]:
    """Regular expressions of what silences and of what is silenced."""
    return [str(inhibition[f"{side}_matchers"][0]).split('"')[1] for side in ("source", "target")]


class Webhook:
    """Takes what Alertmanager posts."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        """Path and alert, one by one."""

        class Handler(http_server.BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                self.posts += [(handler.path, alert) for alert in body["alerts"]]
                handler.send_response(200)
                handler.end_headers()

            def log_message(handler, *_: Any) -> None:  # noqa: N805
                pass

        self._server = http_server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Server and Prometheus after ten scaled minutes of an ordinary load: what is usual, for rules that compare."""
    repository = tmp_path_factory.mktemp("models")
    fault_file = tmp_path_factory.mktemp("fault") / "fault.json"
    checkpoint = tmp_path_factory.mktemp("checkpoints") / "tinypy"
    checkpoint.mkdir()  # not a link itself: the engine remembers where a link leads
    for file in CHECKPOINT.iterdir():
        (checkpoint / file.name).symlink_to(file)
    for name, settings in MODELS.items():
        add_model(repository, name, {**SMALL, "model": str(checkpoint), **settings})
    hooks = Webhook()
    environment = {"QUIRE_FAULT_INJECTION": str(fault_file), "QUIRE_INTROSPECTION_TOKEN": TOKEN}
    with (
        hooks.listening(),
        running_loop() as loop,
        alertmanager(hooks.address, factor=FACTOR) as address,
        serve("--model-repository", str(repository), env=environment) as server,
        prometheus(server.metrics, factor=FACTOR, alertmanager=address) as running,
    ):
        made = Scene(
            server=server, prometheus=running, loop=loop, checkpoint=checkpoint, fault_file=fault_file,
            hooks=None if address is None else hooks,
        )  # fmt: skip
        # Prometheus itself takes some seconds, which are minutes here, until it knows its target.
        wait_until(lambda: running.query('up{job="quire"} == 1'), "the server is watched")
        wait_until(lambda: not made.firing("QuireServerAbsent"), "nothing is said to be absent")
        # A neighbour on the machine can slow a rank or a reading for real, and ten seconds are ten minutes here: what
        # fires of nothing fires in each of three tries.
        for _ in range(3):
            made.fired_in_quiet[:] = quiet_time(made)
            if not made.fired_in_quiet:
                break
            print("fired in quiet:", made.fired_in_quiet)
        yield made


def quiet_time(scene: Scene) -> list[dict[str, str]]:
    """Ten scaled minutes of an ordinary load; the alerts that fired meanwhile."""
    watched_at = time.monotonic()
    with Load(scene, "alone", per_second=1) as alone, Load(scene, "pair", per_second=1) as pair:
        time.sleep(QUIET_SECONDS)  # the time that is watched
    for load in (alone, pair):
        assert load.num_ended
        assert not load.errors
    watched = f"{time.monotonic() - watched_at:.0f}s"
    fired = scene.prometheus.query(
        f'max_over_time(ALERTS{{alertstate="firing", alertname!="QuireWatchdog"}}[{watched}])'
    )
    return [sample.labels for sample in fired]


def wait_until_up(scene: Scene, model: str) -> dict[str, Any]:
    """Wait for an engine that answers; what it says of itself."""
    wait_until(lambda: snapshot(scene.server, model, TOKEN)["engine"]["up"], f"the engine of {model} is up")
    found: dict[str, Any] = snapshot(scene.server, model, TOKEN)["engine"]
    return found


def kill_engine(scene: Scene, model: str) -> None:
    """SIGKILL, as soon as there is one; returns when that was noticed."""
    engine = wait_until_up(scene, model)
    os.kill(engine["pid"], signal.SIGKILL)
    wait_until(lambda: snapshot(scene.server, model, TOKEN)["engine"]["pid"] != engine["pid"]
               or not snapshot(scene.server, model, TOKEN)["engine"]["up"], "its death was noticed")  # fmt: skip


@contextlib.contextmanager
def stopped_server(scene: Scene) -> Iterator[None]:
    """tritonserver is there, and does nothing."""
    (pid,) = [
        pid for pid in scene.server.run_id.processes()
        if b"bin/tritonserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def held_by_debugger(pid: int) -> Iterator[None]:
    """The main thread of a process stands still as at a breakpoint: it is not stopped, and does nothing."""
    seize, interrupt, detach, wait_for_threads = 0x4206, 0x4207, 17, 0x40000000  # linux/ptrace.h, linux/wait.h
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes, ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
    if ptrace(seize, pid, 0, 0):
        pytest.skip(f"a process cannot be held here: {os.strerror(ctypes.get_errno())}")
    try:
        assert ptrace(interrupt, pid, 0, 0) == 0
        os.waitpid(pid, wait_for_threads)
        yield
    finally:
        ptrace(detach, pid, 0, 0)


def test_every_alert_has_a_cause_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    # rules_*test.yml have all. These have no cause here: one fires always, one without any server, and no server starts
    # twice within a sixtieth of ten minutes.
    others = {"QuireWatchdog", "QuireServerAbsent", "QuireServerCrashLoop"}
    assert others == {name for name in RULES if f'fires("{name}"' not in text}


@pytest.mark.parametrize("per_second", [0.0, 50.0])
def test_a_load_that_fails_is_no_load(scene: Scene, per_second: float) -> None:
    class Failing(Load):
        async def _ask(self, client: grpc_aio.InferenceServerClient) -> None:
            self.num_ended += 1
            raise RuntimeError("of the load")

    with pytest.raises(RuntimeError, match="of the load"), Failing(scene, "alone", per_second=per_second) as load:
        wait_until(lambda: load.num_ended, "a request was made")


def test_none_fires_of_an_ordinary_load(scene: Scene) -> None:
    assert not scene.fired_in_quiet


def test_more_requests_than_the_engine_and_its_cache_can_take(scene: Scene) -> None:
    """Four alerts of one cause: answers are long, and asked for faster than they can be given."""
    put_fault(scene.fault_file, action="slow", rank=0, seconds=0.02)  # as of a model that is worth a queue
    began_at = time.monotonic()
    with Load(scene, "alone", per_second=25, max_tokens=200):
        saturated = scene.wait_until_fires("QuireKVCacheSaturated", cause_at=began_at, model="alone")
        fast = scene.wait_until_fires("QuireSLOBurnFast", cause_at=began_at, model="alone")
        scene.wait_until_fires("QuireSLOBurnSlow", cause_at=began_at, model="alone")
        growing = scene.wait_until_fires("QuireQueueGrowing", cause_at=began_at, model="alone")
        assert float(saturated["value"]) > 0.01
        scene.wait_until_fires("QuireSLOBurnSlowest", cause_at=began_at, model="alone")
        assert 14.4 < float(fast["value"]) <= 100.001
        assert float(growing["value"]) > 10
        assert growing["labels"]["instance"] == scene.server.metrics
        assert not any(scene.firing(name, slo="other") for name in RULES)
        assert not any(scene.firing(name, model="pair") for name in RULES)
    scene.fault_file.unlink()
    for name in ("QuireQueueGrowing", "QuireKVCacheSaturated", "QuireSLOBurnFast"):
        scene.wait_until_over(name)


def test_a_rank_that_is_slow(scene: Scene) -> None:
    with Load(scene, "pair"):
        put_fault(scene.fault_file, action="slow", rank=1, seconds=0.1)
        try:
            scene.wait_until_fires("QuireRankSlow", cause_at=time.monotonic(), model="pair", rank="1")
            assert not scene.firing("QuireRankSlow", rank="0"), "the one that waits for it is not to blame"
        finally:
            scene.fault_file.unlink()


def test_a_rank_that_is_gone_while_nobody_notices(scene: Scene) -> None:
    """An engine notices by itself, unless it is in no state to: here a debugger holds it."""
    engine = wait_until_up(scene, "pair")
    with held_by_debugger(engine["pid"]):
        os.kill(engine["ranks"][1]["pid"], signal.SIGKILL)
        scene.wait_until_fires("QuireWorkerDown", cause_at=time.monotonic(), model="pair", rank="1")
        assert not scene.firing("QuireWorkerDown", rank="0")
    wait_until(lambda: snapshot(scene.server, "pair", TOKEN)["engine"]["restarts"] > engine["restarts"], "it noticed")
    scene.wait_until_over("QuireWorkerDown")


def test_an_engine_that_dies_again_and_again(scene: Scene) -> None:
    """The one threshold that is a count per window; restarts take their time, so the window is divided by less."""
    put_fault(scene.fault_file, action="slow", rank=0, seconds=0.05)  # or the load would take a whole processor
    with (
        prometheus(scene.server.metrics, factor=FACTOR / 10) as patient,
        Load(scene, "alone", deadline_seconds=RESTART_SECONDS, max_tokens=5) as load,
    ):
        looking_on = replace(scene, prometheus=patient)
        began_at = time.monotonic()
        while not looking_on.firing("QuireEngineCrashLoop"):
            assert time.monotonic() < began_at + 2 * CRASH_LOOP_SECONDS, "it does not fire"
            num_ended = load.num_ended
            kill_engine(scene, "alone")
            wait_until(lambda before=num_ended: load.num_ended > before, "it is up again")  # type: ignore[misc]
        alert = looking_on.wait_until_fires("QuireEngineCrashLoop", cause_at=began_at, model="alone")
        assert float(alert["value"]) > 2
        assert not load.errors
    scene.fault_file.unlink()


def test_an_engine_that_cannot_be_started_again(scene: Scene) -> None:
    """The disk with the model is away for a while."""
    wait_until_up(scene, "alone")
    wait_until(lambda: all(alert["labels"]["alertname"] != "QuireEngineDown" for alert in scene.prometheus.alerts()),
               "not even a pending alert of an earlier death")  # fmt: skip
    elsewhere = scene.checkpoint.with_name("elsewhere")
    scene.checkpoint.rename(elsewhere)
    try:
        began_at = time.monotonic()
        kill_engine(scene, "alone")
        scene.wait_until_fires("QuireEngineDown", cause_at=began_at, model="alone", instance=scene.server.metrics)
        assert not scene.firing("QuireEngineDown", model="pair")
        wait_until(lambda: "there is no folder" in scene.server.log(), "starting it again fails")
        assert scene.firing("QuireEngineDown", model="alone")
    finally:
        elsewhere.rename(scene.checkpoint)
    scene.wait_until_over("QuireEngineDown")


def test_a_server_that_does_not_answer(scene: Scene) -> None:
    with stopped_server(scene):
        scene.wait_until_fires("QuireServerDown", cause_at=time.monotonic(), instance=scene.server.metrics)
    scene.wait_until_over("QuireServerDown")


def test_somebody_is_told(scene: Scene) -> None:
    """By the real Alertmanager with the example, pages apart from tickets."""
    if scene.hooks is None:
        pytest.skip("Debian's Alertmanager is only unpacked, and its template cannot be put where it looks for it")
    posts = scene.hooks.posts
    with contextlib.nullcontext() if posts else stopped_server(scene):
        wait_until(lambda: any(path == "/page" for path, _ in posts), "a page comes")
    for path, alert in list(posts):
        rule = RULES[alert["labels"]["alertname"]]
        assert path == f"/{rule['labels']['severity']}"
        assert alert["annotations"]["runbook"] == rule["annotations"]["runbook"]
