"""Errors about a missing extra name a command that installs it from where Quire itself was installed."""

import json
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomllib
from quire_cli import dashboard, models, openai
from quire_cli.bench import serve as bench_serve
from quire_engine.system import extras
from quire_engine.system.extras import install_command, missing_package
from support.serving import ROOT
from support.source import all_modules

PIP = [sys.executable, "-m", "pip", "install"]


class Distribution:
    def __init__(self, record: str | None) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._record


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Quire as a package in a folder that is no checkout."""
    place = tmp_path / "site-packages" / "quire_engine" / "system" / "extras.py"
    monkeypatch.setattr(extras, "__file__", str(place))
    return place


def test_extras_that_are_named_exist_and_have_what_is_missing() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*pages, *(path for *_, path in all_modules())])
    listed = re.findall(r"\bextras? ((?:`\w+`(?:,| or| and)? ?)+)", text)
    named = {name for names in listed for name in re.findall(r"\w+(?=`)", names)}
    named |= set(re.findall(r"(?:install_command|missing_package)\(['\"](\w+)['\"]", text))
    assert {"bench", "dashboard", "openai", "otel", "ray", "server"} <= named <= known.keys()
    own = {"grpc": "tritonclient"}  # a part of its extra
    for module in (bench_serve, dashboard, openai, models):
        (extra,) = re.findall(r'missing_package\("(\w+)"', Path(module.__file__ or "").read_text(encoding="utf-8"))
        packages = " ".join(known[extra]).replace("-", "_")
        assert [name for name in module._NEEDS if own.get(name, name) not in packages] == []


def test_in_a_checkout_it_is_installed_from_there() -> None:
    assert shlex.split(install_command("openai")) == [*PIP, "--editable", f"{ROOT}[openai]"]


def test_a_checkout_may_have_a_space_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "my src"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "__file__", str(checkout / "engine" / "quire_engine" / "system" / "extras.py"))
    assert shlex.split(install_command("openai")) == [*PIP, "--editable", f"{checkout}[openai]"]


@pytest.mark.parametrize(
    ("record", "url"),
    [
        ({"url": "file:///my%20src/quire", "dir_info": {}}, "file:///my%20src/quire"),
        ({"url": "file:///tmp/quire-0.1.0.whl", "archive_info": {}}, "file:///tmp/quire-0.1.0.whl"),
        ({"url": "https://git.example.com/quire", "vcs_info": {"vcs": "git"}}, "git+https://git.example.com/quire"),
    ],
)
def test_else_it_is_installed_from_where_pip_had_it(
    record: Any, url: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(json.dumps(record)))
    assert shlex.split(install_command("openai")) == [*PIP, f"quire[openai] @ {url}"]


@pytest.mark.parametrize("record", [None, "", "{"])
def test_without_a_record_the_command_is_for_a_checkout(
    record: str | None, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(record))
    assert shlex.split(install_command("openai")) == [*PIP, "--editable", ".[openai]"]


def test_without_an_installation_the_command_is_for_a_checkout(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert shlex.split(install_command("openai")) == [*PIP, "--editable", ".[openai]"]


def test_only_what_is_missing_is_named() -> None:
    assert missing_package("bench", "json", "sys") == ""
    assert missing_package("bench", "json", "no_such_package").startswith(
        "the package no_such_package is not installed"
    )
