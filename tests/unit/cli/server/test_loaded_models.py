"""Which models a server has that loads and unloads them, and which its successor is told to load."""

import os
from dataclasses import replace

import pytest
from quire_backend.status_page import StubState, StubStatus
from quire_cli.server.launch import ServerFlags
from quire_cli.server.loaded_models import IndexedModel, LoadedModels
from quire_engine.system import process_state

stat = process_state.process_stat(os.getpid())
assert stat is not None
STUB = StubStatus(
    pid=os.getpid(), start_time=stat.start_time, model="ours", version="1", instance="ours_0_0", beats=3,
    state=StubState.UP, reason="", num_in_flight=0, sending=0, num_instances=1,
)  # fmt: skip
ENDING = replace(STUB, state=StubState.ENDING)
DEAD = replace(STUB, start_time=STUB.start_time - 1)
MODE = "--model-control-mode=explicit"


def index(**states: str) -> list[IndexedModel]:
    return [IndexedModel(name, "1", *says.split(" ", 1)) for name, says in states.items()]


@pytest.mark.parametrize(
    ("pages", "said", "expected"),
    [
        ([STUB], None, {"ours"}),
        ([STUB], index(ours="READY", other="READY", never=""), {"ours", "other"}),
        ([STUB], index(other="LOADING"), {"ours"}),
        ([STUB], index(ours="UNLOADING"), set()),
        ([ENDING], None, set()),
        ([ENDING], index(ours="READY"), set()),
        ([ENDING, STUB], index(ours="READY"), {"ours"}),
        ([DEAD], index(ours="READY"), set()),
        ([], None, set()),
    ],
    ids=[
        "page-alone", "both", "index-is-late", "unloading", "ending", "ending-before-the-index", "reloaded", "dead",
        "nothing",
    ],
)  # fmt: skip
def test_what_is_loaded(pages: list[StubStatus], said: list[IndexedModel] | None, expected: set[str]) -> None:
    models = LoadedModels()
    models.update(pages, said)
    assert models.wanted == expected
    assert models.problems == []


@pytest.mark.parametrize(
    ("pages", "said", "expected"),
    [
        ([DEAD], index(ours="READY", other="READY"), {"ours", "other"}),
        ([DEAD], None, {"ours", "other"}),
        ([ENDING], index(ours="READY", other="UNLOADING"), set()),
        ([], index(ours="UNAVAILABLE unloaded", other="UNAVAILABLE unloaded"), set()),
        ([], index(ours="READY", other="READY"), {"ours", "other"}),
        ([], None, {"other"}),
    ],
    ids=["died", "died-in-silence", "unloading", "unloaded", "index-is-late", "page-alone"],
)
def test_what_becomes_of_it(pages: list[StubStatus], said: list[IndexedModel] | None, expected: set[str]) -> None:
    models = LoadedModels()
    models.update([STUB], index(ours="READY", other="READY"))
    models.update(pages, said)
    assert models.wanted == expected
    assert models.problems == []


def test_a_model_that_was_unloaded_a_moment_ago_is_not_loaded_by_an_older_index() -> None:
    models = LoadedModels()
    models.update([STUB], index(ours="READY"))
    models.update([ENDING], index(ours="READY"))
    models.update([], index(ours="READY"))
    assert models.wanted == set()


def test_what_the_next_server_misses_is_named() -> None:
    models = LoadedModels(["asked"])
    models.update([STUB], index(ours="READY", asked="READY"))
    models.start_again()
    models.update([], None)
    assert models.problems == [
        "model 'ours' is not loaded: it is not in the repository, or the server does not tell of it"
    ]
    models.update([], index(ours="UNAVAILABLE no model.json", asked="LOADING"))
    assert models.problems == [
        "model 'asked' is not loaded: it is being loaded", "model 'ours' is not loaded: no model.json",
    ]  # fmt: skip
    assert models.wanted == {"ours", "asked"}, "a later start tries again"
    models.update([STUB], index(ours="READY", asked="UNAVAILABLE unloaded"))
    assert models.problems == []


def test_a_server_that_follows_the_repository_misses_nothing_that_is_not_there() -> None:
    models = LoadedModels(follow_repository=True)
    models.update([STUB], index(ours="READY", other="READY"))
    models.start_again()
    models.update([], index(ours="UNAVAILABLE no model.json"))
    assert models.problems == ["model 'ours' is not loaded: no model.json"]
    assert models.flags(ServerFlags(("--model-control-mode=poll",))).tokens == (
        "--model-control-mode=poll", "--exit-on-error=false",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "unloads", "expected"),
    [
        ((MODE,), False, (MODE, "--load-model=ours", "--exit-on-error=false")),
        (
            (MODE, "--load-model", "x", "--exit-on-error=true"), False,
            (MODE, "--exit-on-error=true", "--load-model=ours", "--load-model=x"),
        ),
        ((MODE, "--load-model=*"), False, (MODE, "--load-model=*", "--exit-on-error=false")),
        ((MODE, "--load-model=*"), True, (MODE, "--load-model=ours", "--exit-on-error=false")),
    ],
    ids=["by-api", "the-user's-too", "all", "all-but-one"],
)  # fmt: skip
def test_flags(given: tuple[str, ...], unloads: bool, expected: tuple[str, ...]) -> None:
    flags = ServerFlags(given)
    models = LoadedModels(flags.all_values("load-model"))
    assert models.flags(flags) == flags, "nothing is known yet"
    models.update([STUB], index(ours="READY", other="READY" if unloads else ""))
    models.update([STUB], index(ours="READY", other="UNAVAILABLE unloaded" if unloads else ""))
    assert models.flags(flags).tokens == expected
