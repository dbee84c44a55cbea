"""The drill: faults at random under mixed streams, for as long as you like.

    .venv/bin/python tests/integration/test_drill.py --minutes 30

Processes are killed, stopped and continued, models reloaded, unloaded and given a second instance, files and
descriptors taken away, clients cancel, do not read, or send what is hostile (`tests/support/drill/events.py`).
Meanwhile every stream must get the tokens of an undisturbed run; afterwards every probe must say what is true, and
nothing may be left over.

The same seed gives the same events in the same order; when exactly they strike is the machine's.
"""

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.drill.events import EVENTS
from support.drill.stage import EXPLICIT, MODELS, Stage, write_repository
from support.drill.streams import Streams
from support.serving import serve

pytestmark = [pytest.mark.server, pytest.mark.slow]

STEP_SECONDS = 0.02
"""How much longer steps take than the demo model needs: streams live for a second or two, are there to be hit, and
leave the processor to what starts."""

NOT_OUTLIVED = ("kill_server_process", "stop_server_process")
"""They end all streams, and take up to half a minute each."""
MOST_SHOWN = 20
"""Of the failures."""
ENOUGH_EVENTS = 30
"""For memory to be judged by its medians."""
MEMORY_GROWTH = 1.2
"""Between the first third of a drill and the last, at most. Engines that have just started have less than others."""


def drill(minutes: float, seed: int, names: list[str]) -> Stage:
    """Play it.

    Args:
        minutes: for how long events begin.
        seed: of the events and the streams.
        names: of the events to choose from.

    Returns:
        What was seen.

    Raises:
        AssertionError: a request was lost or changed, a probe is wrong and stays so, or something is left over.
    """
    random = Random(seed)
    print(f"drill of {minutes:g} minutes with seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="quire-drill-") as folder:
        repository = Path(folder, "models")
        write_repository(repository)
        with serve("--model-repository", str(repository), *EXPLICIT, step_seconds=STEP_SECONDS) as server:
            stage = Stage(server, repository, Streams(server, MODELS, seed))
            stage.streams.start()
            try:
                began = time.monotonic()
                waiting: list[str] = []
                while time.monotonic() < began + 60 * minutes:
                    waiting = waiting or random.sample(names, len(names))
                    _play(stage, waiting.pop(), random, began)
            finally:
                stage.streams.stop()
    _check_memory(stage)
    return stage


def _play(stage: Stage, name: str, random: Random, began: float) -> None:
    started = time.monotonic()
    try:
        EVENTS[name](stage, random)
        stage.wait_until_served()
    except Exception as error:
        failures = "\n".join(stage.streams.failures[:MOST_SHOWN])
        state = stage.state()
        raise AssertionError(f"after {name}: {error}\n{state}\n{failures}\nits log:\n{stage.server.log()}") from error
    stage.take_memory()
    now = time.monotonic()
    print(f"{now - began:7.1f} s  {name}: {now - started:.1f} s; {dict(stage.streams.counts)}", flush=True)
    if stage.streams.failures:
        failures = "\n".join(stage.streams.failures[:MOST_SHOWN])
        raise AssertionError(f"during {name}:\n{failures}\nits log:\n{stage.server.log()}")


def _check_memory(stage: Stage) -> None:
    totals = [sum(kinds.values()) for kinds in stage.memory]
    if len(totals) >= ENOUGH_EVENTS:
        third = len(totals) // 3
        first, last = statistics.median(totals[:third]), statistics.median(totals[-third:])
        assert last < MEMORY_GROWTH * first, f"memory grew from {first} to {last} MiB: {stage.memory}"


def report(stage: Stage) -> dict[str, object]:
    """The figures, for people and for machines."""
    return {
        "requests": dict(stage.streams.counts),
        "worst_lag_seconds": {probe: round(max(lags), 2) for probe, lags in stage.lags.items()},
        "memory_mib": {"first": stage.memory[0], "last": stage.memory[-1]},
        "memory_total_mib": [sum(kinds.values()) for kinds in stage.memory],
    }


def test_a_minute_of_the_drill() -> None:
    """What the server outlives, with the same events in each run unless the environment says otherwise."""
    outlived = [name for name in EVENTS if name not in NOT_OUTLIVED]
    stage = drill(1.0, int(os.environ.get("QUIRE_DRILL_SEED", "1")), outlived)
    print(json.dumps(report(stage), indent=1))
    assert stage.streams.counts["as undisturbed"] > len(MODELS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long events begin (30)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="of a run to repeat; random")
    parser.add_argument("--events", nargs="+", default=list(EVENTS), choices=list(EVENTS), metavar="EVENT",
                        help=f"only these, of {', '.join(EVENTS)}")  # fmt: skip
    options = parser.parse_args()
    print(json.dumps(report(drill(options.minutes, options.seed, options.events)), indent=1))


if __name__ == "__main__":
    main()
