"""Several servers in one dashboard: each by itself, and one that is away holds up nobody."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from quire_client import Client
from quire_dashboard import watchers
from quire_dashboard.settings import Settings, to_environment
from quire_dashboard.views import requests
from quire_dashboard.views.load import stop_all
from quire_dashboard.watchers import close_monitors, monitors
from quire_load import scrape
from streamlit.testing.v1 import AppTest
from support.fake_triton import TOKEN, FakeTriton, fake_triton
from support.pages import open_page, press, text_of

pytestmark = pytest.mark.filterwarnings("default")  # those of Streamlit and pandas are not ours

ID = "cccc3333dddd4444"
NAME = "chat (cccc33)"


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeTriton, FakeTriton]]:
    """Two servers with a model of the same name and requests of the same ids, which this process' dashboard watches."""
    with ExitStack() as stack:
        found = stack.enter_context(fake_triton()), stack.enter_context(fake_triton())
        servers = [Settings(url=one.url, metrics=one.metrics, introspection_token=TOKEN) for one in found]
        for name, value in to_environment(servers).items():
            monkeypatch.setenv(name, value)
        yield found
        stop_all()
        close_monitors()


def read_again() -> None:
    for watcher in monitors().values():
        watcher.read()


def labels(app: AppTest) -> list[str]:
    return [button.label.replace("\\:", ":") for button in app.button]


def test_the_strip_shows_all_servers_and_a_press_chooses_one(pair: tuple[FakeTriton, FakeTriton]) -> None:
    first, second = pair
    open_page("overview")
    second.state.set("requests_running", 7)
    second.state.set("engine_up", 0)
    read_again()
    app = open_page("overview")
    other = f":red[●] {second.url} tinypy: in trouble, 7 running"
    assert labels(app) == [f":green[●] {first.url} tinypy: well, 2 running", other]
    assert "Running=2" in text_of(app)
    app.button[1].click()
    text = text_of(app.run())
    assert "Nobody is being served: the engine is down." in text
    assert app.selectbox(key="server").value == second.url
    assert app.query_params["server"] == second.url


def test_the_choice_of_server_comes_by_address_and_keeps_what_the_other_server_has_too(
    pair: tuple[FakeTriton, FakeTriton],
) -> None:
    first, second = pair
    for one in pair:
        one.state.set("engine_up", 1, model="both")
    second.state.set("engine_up", 1, model="another")
    read_again()
    app = open_page("engine", server=second.url, model="another", range="15 minutes")
    chosen = [app.selectbox(key=key).value for key in ("server", "model", "range")]
    assert chosen == [second.url, "another", "15 minutes"]
    app.selectbox(key="server").set_value(first.url).run()
    assert app.selectbox(key="model").options == ["both", "tinypy"]
    assert app.selectbox(key="model").value == "both", "the first one has none of that name"
    app.selectbox(key="model").set_value("tinypy").run()
    app.selectbox(key="server").set_value(second.url).run()
    assert app.selectbox(key="model").value == "tinypy"
    assert open_page("engine", server="nowhere:1").selectbox(key="server").value == first.url


def test_histories_are_each_servers_own(pair: tuple[FakeTriton, FakeTriton]) -> None:
    _, second = pair
    open_page("overview")
    second.state.finish(30)
    second.state.set("kv_cache_usage_ratio", 0.5)
    read_again()
    app = open_page("overview")
    assert "KV cache=25.0%" in text_of(app)
    assert "**KV cache** &nbsp; :gray[used 25.0%]" in text_of(app)
    app.selectbox(key="server").set_value(second.url)
    assert "KV cache=50.0%" in text_of(app.run())
    assert "**KV cache** &nbsp; :gray[used 50.0%]" in text_of(app)


def test_a_request_is_cancelled_where_it_was_chosen(pair: tuple[FakeTriton, FakeTriton]) -> None:
    first, second = pair
    app = open_page("requests", server=second.url)
    app.session_state["chosen"] = requests._Chosen("tinypy", ID, NAME, second.url)
    app.run()
    press(app, f"Cancel `{NAME}`…")
    app.run()
    assert f"Cancel `{NAME}` at `{second.url}`?" in text_of(app)
    app.selectbox(key="server").set_value(first.url).run()
    assert not app.button, "the same id there is another request"
    app.selectbox(key="server").set_value(second.url).run()
    press(app, f"Cancel `{NAME}` now")
    assert f"Request `{NAME}` was cancelled." in text_of(app.run())
    assert (first.state.cancelled, second.state.cancelled) == ([], [ID])


def test_the_playground_and_ended_requests_are_of_the_chosen_server(pair: tuple[FakeTriton, FakeTriton]) -> None:
    first, second = pair
    second.state.end(label="theirs")
    app = open_page("ended", server=second.url)
    assert list(app.dataframe[0].value["request"]) == ["theirs"]
    app.selectbox(key="server").set_value(first.url)
    assert "No request has ended" in text_of(app.run())
    app = open_page("playground", server=second.url)
    press(app, "Generate")
    assert "return n" in text_of(app.run())
    assert (len(first.state.prompts), len(second.state.prompts)) == (0, 1)
    app.selectbox(key="server").set_value(first.url)
    assert "return n" not in text_of(app.run()), "this one was not asked"


def test_one_that_is_away_says_for_how_long_and_holds_nobody_up(
    pair: tuple[FakeTriton, FakeTriton], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    open_page("overview")
    second.stop()
    read_again()

    def never(*_: object) -> None:
        raise AssertionError("a page has asked a server that is known to be away")

    app = open_page("overview", server=first.url)
    away = labels(app)[1]
    assert away.startswith(f":red[●] {second.url}: no answer for ")
    assert "does not answer" not in text_of(app)
    assert "Users are served" in text_of(app) or "The server is up" in text_of(app)
    app.button[1].click()
    with monkeypatch.context() as patch:
        for call in ("snapshot", "ended", "models", "has_chat_template"):
            patch.setattr(Client, call, never)
        text = text_of(app.run())
        assert "**The server does not answer" in text
        assert f"`{second.url}`: " in text
        assert "What is shown is" in text
        for page in ("requests", "ended"):
            assert "does not answer" in text_of(open_page(page, server=second.url))


def test_one_that_never_was_there_is_told_apart_from_one_without_models(
    pair: tuple[FakeTriton, FakeTriton],
) -> None:
    first, second = pair
    second.stop()
    with first.state.lock:
        first.state.samples.clear()
        first.state.observations.clear()
    app = open_page("overview", server=second.url, model="tinypy")
    assert labels(app)[0] == f":orange[●] {first.url}: no model"
    assert "There is nothing to show yet, after" in text_of(app)
    assert "does not answer" in text_of(open_page("playground", server=second.url))


def test_a_silent_server_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is taken, and nothing is said."""

    monkeypatch.setattr(watchers, "_FIRST_READINGS_S", 0.2)
    monkeypatch.setattr(scrape, "_TIMEOUT_S", 60.0)
    with fake_triton() as running, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        servers = [Settings(url=address, metrics=address), Settings(url=running.url, metrics=running.metrics)]
        for name, value in to_environment(servers).items():
            monkeypatch.setenv(name, value)
        found = list(monitors().values())
        assert found[0].error == "no reading of /metrics yet", "or its timeout is over"
        found[1].wait()
        assert not found[1].error
        silent.close()
        close_monitors()


def test_where_there_are_too_many_those_that_are_well_make_room(
    pair: tuple[FakeTriton, FakeTriton],
) -> None:
    first, second = pair
    for number in range(14):
        first.state.set("engine_up", 1, model=f"model{number:02}")
    second.state.set("engine_up", 0)
    read_again()
    app = open_page("overview")
    assert len(app.button) == 12
    assert "in trouble" in labels(app)[-1], "the last of all comes before those that are well"
    assert "4 more, all well, are in the lists at the left." in text_of(app)
