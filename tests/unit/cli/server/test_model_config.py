"""Slips in a config.pbtxt are found before a server is started, and named."""

import os
from pathlib import Path

import pytest
from quire_cli.errors import CommandError
from quire_cli.model_repository import demo_repository
from quire_cli.options import ServeOptions
from quire_cli.serve import serve
from quire_cli.server.model_config import check_model_configs

GOOD = """\
# comment
backend: "quire"
instance_group [ { count: 1 kind: KIND_MODEL } ]
parameters: { key: "x" value: { string_value: "1" } }
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("instance_group", "instance_grp"), "line 3: ModelConfig has no field 'instance_grp'; did you mean "
         "'instance_group'?"),
        (("kind:", "knd:"), "line 3: ModelInstanceGroup has no field 'knd'; did you mean 'kind'?"),
        (("KIND_MODEL", "KIND_MODL"), "line 3: KIND_MODL is none of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL; did you "
         "mean 'KIND_MODEL'?"),
        (('"quire"', "quire"), "line 2: "),
        (("count: 1", 'count: "1"'), "line 3: "),
        (("} ]", "}"), "line 4: "),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_slip_is_named(change: tuple[str, str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "config.pbtxt"
    file.write_text(GOOD)
    check_model_configs(tmp_path, pytest.fail)
    file.write_text(GOOD.replace(*change))
    with pytest.raises(CommandError) as raised:
        check_model_configs(tmp_path, pytest.fail)
    assert str(raised.value).startswith(f"{file}, {reason}")
    assert "\n" not in str(raised.value)


def test_the_demo_models_is_fine() -> None:
    repository = demo_repository()
    assert repository is not None
    check_model_configs(repository, pytest.fail)


def test_nothing_is_checked_without_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text("nonsense")
    monkeypatch.setattr("quire_cli.server.model_config.package_folder", lambda name: None)
    check_model_configs(tmp_path, pytest.fail)


@pytest.mark.parametrize("loader", ["raise ModuleNotFoundError('google')", "raise TypeError('Descriptors cannot be')"])
def test_nothing_is_checked_where_the_schema_cannot_be_loaded(
    loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text("nonsense")
    (tmp_path / "tritonclient" / "grpc").mkdir(parents=True)
    (tmp_path / "tritonclient" / "grpc" / "model_config_pb2.py").write_text(loader)
    monkeypatch.setattr("quire_cli.server.model_config.package_folder", lambda name: tmp_path / name)
    check_model_configs(tmp_path, pytest.fail)


@pytest.mark.parametrize(
    ("change", "line", "name"),
    [(("# comment", "xyzzy { a: 1 }"), 1, "'xyzzy'"), (("KIND_MODEL", "XYZZY"), 3, "XYZZY")],
    ids=["field", "value"],
)
def test_what_a_newer_server_may_know_is_only_told(
    change: tuple[str, str], line: int, name: str, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "config.pbtxt"
    file.write_text(GOOD.replace(*change))
    told: list[str] = []
    check_model_configs(tmp_path, told.append)
    assert len(told) == 1
    assert told[0].startswith(f"{file}, line {line}: ")
    assert name in told[0]


def test_what_a_newer_server_may_know_hides_no_slip(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text("xyzzy: 1\n" + GOOD + "}")
    told: list[str] = []
    with pytest.raises(CommandError, match="line 6: "):
        check_model_configs(tmp_path, told.append)
    assert len(told) == 1


def test_serve_says_it_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backnd: "quire"')
    with pytest.raises(CommandError, match=r"no field 'backnd'; did you mean 'backend'\?"):
        serve(ServeOptions(model_repository=tmp_path, dashboard=False))


@pytest.mark.parametrize("flag", ["--model-control-mode=explicit", "--exit-on-error=false"])
def test_where_the_server_starts_without_the_model_it_is_only_told(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_server() -> None:
        raise CommandError("the next step")

    monkeypatch.setattr("quire_cli.serve.find_tritonserver", no_server)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backnd: "quire"')
    with pytest.raises(CommandError, match="the next step"):
        serve(ServeOptions(model_repository=tmp_path, dashboard=False, server_flags=[flag]))
    assert "no field 'backnd'; did you mean 'backend'?" in capsys.readouterr().err


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "config.pbtxt")
    with pytest.raises(CommandError, match="is no regular file"):
        check_model_configs(tmp_path, pytest.fail)
