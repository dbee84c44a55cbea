"""`quire join` and `quire keys host`: an error is one line on stderr, before an engine starts."""

import json
from pathlib import Path

import pytest
from quire_cli.main import run
from support.ports import unused_port
from support.remote import trusting_hosts

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model with a replica on another host, and the keys of both hosts."""
    front, engine = trusting_hosts(tmp_path)
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    settings = {
        "model": str(CHECKPOINT), "data_parallel_size": 2, "data_parallel_size_local": 1,
        "data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": unused_port(),
        "data_parallel_key_file": str(engine),
    }  # fmt: skip
    (folder / "model.json").write_text(json.dumps(settings))
    assert front.is_file()
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ([], 2, "Missing option '--data-parallel-start-rank'"),
        (["--data-parallel-start-rank", "2"], 1, "data_parallel_start_rank is 2; it must be from 1 to 1 for 1 of"),
        (["--data-parallel-start-rank", "1", "--data-parallel-size-local", "2"], 1, "must be less than"),
        (["--data-parallel-start-rank", "1", "--name", "n"], 1, "holds no model n, but m"),
        (["--data-parallel-start-rank", "1", "--model", "x"], 2, "No such option: --model "),
        (["--data-parallel-start-rank", "1", "--data-parallel-key-file", "/none"], 1, "/none is not there; make it"),
    ],
)
def test_wrong_usage(
    repository: Path, arguments: list[str], code: int, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["join", "--model-repository", str(repository), *arguments]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert part in err


def test_its_options_are_for_it_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--data-parallel-rpc-port", "7"]) == 2
    assert "No such option: --data-parallel-rpc-port" in capfd.readouterr().err


def test_a_file_that_trusts_several_hosts_is_no_engines(
    repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "several.json"
    for name in ("front.json", "engine.json"):
        assert run(["keys", "host", str(tmp_path / name)]) == 0
        public_key = capfd.readouterr().out.strip()
        assert run(["keys", "host", str(keys), "--trust", public_key]) == 0
        said = capfd.readouterr()
    assert "several.json trusts 2 hosts" in said.err
    options = ["--data-parallel-start-rank", "1", "--data-parallel-key-file", str(keys)]
    assert run(["join", "--model-repository", str(repository), *options]) == 1
    assert "trusts 2 hosts; that of a host whose engines join a front has one peer" in capfd.readouterr().err
    assert run(["keys", "host", str(keys), "--trust", "me"]) == 1
    assert "the public key is no key" in capfd.readouterr().err


def test_the_repository_is_that_of_serve_unless_another_is_given(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    repository.rename(tmp_path / "model_repository")
    monkeypatch.chdir(tmp_path)
    assert run(["join", "--data-parallel-start-rank", "1", "--name", "n"]) == 1
    assert "holds no model n, but m" in capfd.readouterr().err
