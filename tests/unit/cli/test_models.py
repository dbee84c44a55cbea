"""`quire model scale` and its neighbours, against a stand-in for a server: what is printed, and how they fail."""

from pathlib import Path

import pytest
from quire_cli.main import run
from support.fake_triton import MODEL, TOKEN, fake_triton
from support.ports import free_port


def test_it_says_what_has_become_of_the_replicas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", TOKEN)
    with fake_triton() as fake:
        said = []
        for number in ("3", "3", "1"):
            assert run(["model", "scale", MODEL, number, "--url", fake.url]) == 0
            said.append(capsys.readouterr().out)
    assert said == [
        "quire: tinypy has 3 replicas, and had 1\n",
        "quire: tinypy has 3 replicas already\n",
        "quire: tinypy has 1 replica, and had 3\n",
    ]


def test_it_says_that_those_of_other_hosts_are_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", TOKEN)
    with fake_triton() as fake:
        said = []
        for number, fake.state.num_remote_replicas in (("2", 0), ("2", 1), ("3", 2)):
            assert run(["model", "scale", MODEL, number, "--url", fake.url]) == 0
            said.append(capsys.readouterr().out)
    assert said == [
        "quire: tinypy has 2 replicas on its own host, and had 1; none of other hosts is up\n",
        "quire: tinypy has 2 replicas on its own host already; 1 of other hosts is up\n",
        "quire: tinypy has 3 replicas on its own host, and had 2; 2 of other hosts are up\n",
    ]


def test_models_of_a_server_are_listed_with_the_health_of_their_engines(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_triton() as fake:
        for fake.state.health, words in (
            ({"healthy": True}, "healthy"), ({"healthy": True, "is_sleeping": True}, "asleep"),
            ({"healthy": False}, "unhealthy"), ({"other": 1}, "unknown"),
        ):  # fmt: skip
            assert run(["model", "list", "--url", fake.url]) == 0
            assert capsys.readouterr().out.split() == [MODEL, words]
    with free_port() as port:
        assert run(["model", "list", "--url", f"127.0.0.1:{port}"]) == 1
    assert f"the server at 127.0.0.1:{port} does not answer" in capsys.readouterr().err
    assert run(["model", "list", "--url", "a:1", "--model-repository", "b"]) == 2


def test_a_model_sleeps_wakes_up_and_gets_weights_and_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    said = []
    with fake_triton() as fake:
        for words in (["sleep", MODEL, "--level", "2"], ["wake", MODEL], ["update-weights", MODEL, "new"],
                      ["reset-cache", MODEL]):  # fmt: skip
            assert run(["model", *words, "--url", fake.url]) == 0
            said.append(capsys.readouterr().out)
        assert [one["introspect"] for one in fake.state.operations] == [
            "sleep", "wake_up", "update_weights", "reset_prefix_cache",
        ]  # fmt: skip
        assert fake.state.operations[0] == {"introspect": "sleep", "level": 2, "mode": "wait"}
        assert fake.state.operations[2]["weights_path"] == str(tmp_path / "new"), "the server has another folder"
    assert said == [
        "quire: tinypy sleeps; quire model wake tinypy wakes it up\n",
        "quire: tinypy is awake\n",
        f"quire: tinypy has the weights of {tmp_path / 'new'}\n",
        "quire: tinypy has an empty prefix cache\n",
    ]


def test_what_fails_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("QUIRE_INTROSPECTION_TOKEN", raising=False)
    with fake_triton() as fake:
        assert run(["model", "scale", MODEL, "2", "--url", fake.url]) == 1
        assert fake.state.num_replicas == 1
    assert capsys.readouterr().err.endswith("quire: tinypy: introspection_token is wrong or missing\n")
    with free_port() as port:
        assert run(["model", "scale", MODEL, "2", "--url", f"127.0.0.1:{port}"]) == 1
    assert f"the server at 127.0.0.1:{port} does not answer" in capsys.readouterr().err
    assert run(["model", "scale", MODEL, "0"]) == 2
    assert "Invalid value for 'N'" in capsys.readouterr().err
    assert run(["model", "sleep", MODEL, "--level", "3"]) == 2
    assert run(["model", "sleep", MODEL, "--mode", "keep"]) == 2
    assert "--mode is 'keep'; it must be wait or abort" in capsys.readouterr().err
