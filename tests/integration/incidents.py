"""Eleven incidents, and how soon the dashboard names each.

    .venv/bin/python tests/integration/incidents.py --quiet-minutes 10

A real server under an ordinary load is struck by one cause after another (`tests/support/drill/incidents.py`). The
dashboard's own watcher looks on, and the first line of its overview is read every second: it has to name each incident
within 10 s (an overload within 3 s of the first request that misses its objective), to keep to that cause, and to be as
before within 10 s after the cause is gone; and the log of incidents has to have a row. Before the first incident it has
to find nothing for as long as `--quiet-minutes` says. Without that, all of it takes some six minutes.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quire_client.symptoms import Level
from quire_dashboard.incidents import family
from quire_dashboard.monitor import Monitor
from quire_dashboard.settings import Settings
from support.drill.incidents import (
    INCIDENTS,
    MODELS,
    NAMED_SECONDS,
    SLOW_STEPS,
    TOKEN,
    Incident,
    Scene,
    ordinary_load,
    write_repository,
)
from support.drill.relay import Relay
from support.event_loop import running_loop
from support.faults import put_fault
from support.serving import serve, wait_until

LOOK_SECONDS = 1.0
CLEARED_SECONDS = 10.0
STEADY_SECONDS = 5.0
"""For so long it has to say that all is well, or it is not over."""
PATIENCE_SECONDS = 90.0
"""For so long is waited for a line, so that the table says how late it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What the overview said first of a model, at a moment."""

    at: float
    """`time.monotonic()`"""
    model: str
    line: str
    cause: str
    """The family of the first finding's; empty without one."""
    is_well: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was said of an incident."""

    name: str
    line: str
    """The first one that named it, else the last one."""
    named_seconds: float | None
    """After the incident was there; None: not in time, nor long after."""
    cleared_seconds: float | None
    """After its cause was gone."""
    causes: tuple[str, ...]
    """That led the verdict one after the other, from the first line that named it until its cause was gone."""
    rows: tuple[str, ...]
    """Of the log of incidents."""

    @property
    def is_good(self) -> bool:
        """Whether it was named and over in time, and noted, and only one cause was."""
        named, cleared = self.named_seconds, self.cleared_seconds
        if named is None or cleared is None or len(self.causes) > 1:
            return False
        return named <= INCIDENTS[self.name].named_seconds and cleared <= CLEARED_SECONDS and bool(self.rows)


class Onlooker:
    """A visitor of the overview who looks at all models every second, and remembers.

    Args:
        watcher: of the dashboard.
    """

    def __init__(self, watcher: Monitor) -> None:
        self.said: list[Said] = []
        self._watcher = watcher
        self._over = threading.Event()
        self._failure: BaseException | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look on meanwhile."""
        thread = threading.Thread(target=self._run, name="onlooker")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(LOOK_SECONDS):
                for model in MODELS:
                    self._look(model)
        except BaseException as failure:
            self._failure = failure

    def _look(self, model: str) -> None:
        _, health = self._watcher.judge(model)
        is_well = health.level is Level.OK and not health.findings
        cause = family(health.findings[0].cause) if health.findings else ""
        said = Said(at=time.monotonic(), model=model, line=health.headline, cause=cause, is_well=is_well)
        before = next((one for one in reversed(self.said) if one.model == model), None)
        self.said.append(said)
        if before is None or before.line != said.line:
            print(f"    {time.strftime('%H:%M:%S')} {model}: {said.line}", flush=True)

    def since(self, at: float, model: str) -> list[Said]:
        """What was said of a model from a moment on."""
        return [one for one in self.said if one.at >= at and one.model == model]

    def wait_until_named(self, incident: Incident, since: float) -> Said | None:
        """The first line that names an incident; None if none does for long."""

        def found() -> Said | None:
            lines = self.since(since, incident.model)
            return next((one for one in lines if any(words in one.line.lower() for words in incident.words)), None)

        while (said := found()) is None and time.monotonic() < since + 2 * NAMED_SECONDS:
            time.sleep(0.1)
        return said

    def wait_until_well(self, since: float) -> float | None:
        """When all is well with every model, and stays so; None if it is not for long."""

        def begins(model: str) -> float | None:
            at = None
            for one in self.since(since, model):
                at = None if not one.is_well else one.at if at is None else at
            return at

        while time.monotonic() < since + PATIENCE_SECONDS:
            moments = [begins(model) for model in MODELS]
            if None not in moments and (latest := max(filter(None, moments))) < time.monotonic() - STEADY_SECONDS:
                return latest
            time.sleep(0.1)
        return None


def drill(names: Sequence[str], quiet_seconds: float) -> list[Result]:
    """Play incidents one after the other.

    Args:
        names: of the incidents.
        quiet_seconds: for how long an ordinary load comes first.

    Returns:
        What was said of each.

    Raises:
        AssertionError: something was found though there was nothing.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-incidents-")))
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        write_repository(folder / "models")
        put_fault(folder / "fault.json", **SLOW_STEPS)
        environment = {"QUIRE_FAULT_INJECTION": str(folder / "fault.json"), "QUIRE_INTROSPECTION_TOKEN": TOKEN}
        loop = stack.enter_context(running_loop())
        repository = ("--model-repository", str(folder / "models"), "--no-dashboard")
        server = stack.enter_context(serve(*repository, env=environment))
        relay = stack.enter_context(Relay.to(loop, server.metrics))
        watcher = Monitor(
            Settings(url=server.grpc, metrics=relay.address, health=server.health, introspection_token=TOKEN)
        )
        stack.callback(watcher.stop)
        watcher.start()
        to_end = stack.enter_context(ExitStack())
        scene = Scene(server=server, loop=loop, fault_file=folder / "fault.json", relay=relay, to_end=to_end)
        onlooker = Onlooker(watcher)
        stack.enter_context(onlooker.looking())
        loads = stack.enter_context(ordinary_load(scene))
        wait_until(lambda: all(load.num_ended for load in loads), "requests of the ordinary load end")
        since = time.monotonic()
        time.sleep(quiet_seconds)  # the time that is watched
        found = sorted({(one.model, one.line) for one in onlooker.said if one.at > since and not one.is_well})
        print(f"ordinary load of {quiet_seconds:.0f} s: {found or 'nothing found'}", flush=True)
        results = [_play(scene, onlooker, watcher, name) for name in names]
    assert not found, f"of an ordinary load it is said: {found}"
    return results


def _play(scene: Scene, onlooker: Onlooker, watcher: Monitor, name: str) -> Result:
    print(f"{name}: {(INCIDENTS[name].begin.__doc__ or '').strip()}", flush=True)
    began_at, before = time.monotonic(), {row.id for row in watcher.incidents.rows()}
    with INCIDENTS[name].begin(scene) as later:
        since = began_at if later is None else later
        named = onlooker.wait_until_named(INCIDENTS[name], since)
    over_at = time.monotonic()
    lines = onlooker.since(named.at if named else over_at, INCIDENTS[name].model)
    causes = [one.cause for one in lines if one.at < over_at]
    well_at = onlooker.wait_until_well(over_at)
    scene.to_end.close()
    rows = [row for row in watcher.incidents.rows() if row.id not in before]
    return Result(
        name=name, line=(named or onlooker.said[-1]).line, named_seconds=named and named.at - since,
        cleared_seconds=well_at and well_at - over_at,
        causes=tuple(cause for number, cause in enumerate(causes) if not number or causes[number - 1] != cause),
        rows=tuple(f"{row.title} ({row.num_hurt} hurt)" for row in reversed(rows)),
    )  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """For people."""

    def seconds(value: float | None) -> str:
        return "   never" if value is None else f"{value:6.1f} s"

    rows = [
        f"{'  ' if one.is_good else '! '}{one.name:22} {seconds(one.named_seconds)} {seconds(one.cleared_seconds)}  "
        f"{one.line}  [{' > '.join(one.causes)}]  rows: {'; '.join(one.rows) or 'none'}"
        for one in results
    ]
    return "\n".join([f"  {'incident':22} {'named':>8} {'cleared':>8}  first line", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quiet-minutes", type=float, default=0.5, help="of ordinary load before the first one (0.5)")
    parser.add_argument("--incidents", nargs="+", default=list(INCIDENTS), choices=list(INCIDENTS), metavar="INCIDENT",
                        help=f"only these, of {', '.join(INCIDENTS)}")  # fmt: skip
    options = parser.parse_args()
    results = drill(options.incidents, 60 * options.quiet_minutes)
    print(table(results))
    sys.exit(any(not one.is_good for one in results))


if __name__ == "__main__":
    main()
