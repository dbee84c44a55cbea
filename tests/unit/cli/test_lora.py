"""`quire lora`, against a stand-in for a server: what is asked for, what is printed, and how it fails."""

import json
from pathlib import Path

import pytest
from quire_cli.main import run
from support.fake_triton import MODEL, TOKEN, fake_triton
from support.ports import free_port


def test_adapters_are_loaded_listed_pinned_and_unloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sql").mkdir()

    def said(*arguments: str, code: int = 0) -> str:
        assert run(["lora", *arguments, "--url", fake.url]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    with fake_triton() as fake:
        about = "rank 8  2.5 MB  0 running, 0 waiting"
        assert said("load", MODEL, "sql", "sql") == (
            f"quire: tinypy has the adapter sql  ready  {about}  {tmp_path / 'sql'}\n"
        )
        assert said("load", MODEL, "sql", "/elsewhere", code=1) == "quire: tinypy: lora_name is 'sql'\n"
        assert "ready, pinned" in said("load", MODEL, "sql", "/elsewhere", "--replace", "--pin")
        assert fake.state.adapters["sql"]["folder"] == "/elsewhere"  # a folder of the server's host
        said("load", MODEL, "law", "/adapters/law")
        assert said("pin", MODEL, "law") == (
            f"quire: tinypy has the adapter law  ready, pinned  {about}  /adapters/law\n"
        )
        assert said("list", MODEL).splitlines() == [
            f"sql  ready, pinned  {about}  /elsewhere", f"law  ready, pinned  {about}  /adapters/law",
        ]  # fmt: skip
        assert [one["name"] for one in json.loads(said("list", MODEL, "--json"))] == ["sql", "law"]
        assert said("unload", MODEL, "sql") == "quire: tinypy has unloaded the adapter sql\n"
        assert said("unload", MODEL, "sql", code=1) == "quire: tinypy: lora_name is 'sql'\n"


def test_a_server_that_is_away_and_a_wrong_token_are_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QUIRE_INTROSPECTION_TOKEN", raising=False)
    with fake_triton() as fake:
        assert run(["lora", "list", MODEL, "--url", fake.url]) == 1
    assert capsys.readouterr().err == "quire: tinypy: introspection_token is wrong or missing\n"
    with free_port() as port:
        assert run(["lora", "list", MODEL, "--url", f"127.0.0.1:{port}"]) == 1
    assert f"the server at 127.0.0.1:{port} does not answer" in capsys.readouterr().err
