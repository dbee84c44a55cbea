"""Errors about a missing extra name a command that installs it from where Quire itself was installed."""

import json
import shlex
import sys
from importlib import metadata
from typing import Any

import pytest
from quire_engine.system.extras import install_command, missing_package

PIP = [sys.executable, "-m", "pip", "install"]


class Distribution:
    def __init__(self, record: str | None) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._record


@pytest.mark.parametrize(
    ("record", "arguments"),
    [
        ({"url": "file:///src/quire", "dir_info": {"editable": True}}, ["--editable", "/src/quire[openai]"]),
        ({"url": "file:///my%20src/quire", "dir_info": {}}, ["/my src/quire[openai]"]),
        ({"url": "file:///tmp/quire-0.1.0.whl", "archive_info": {}}, ["quire[openai] @ file:///tmp/quire-0.1.0.whl"]),
        (
            {"url": "https://git.example.com/quire", "vcs_info": {"vcs": "git"}},
            ["quire[openai] @ git+https://git.example.com/quire"],
        ),
        (None, ["--editable", ".[openai]"]),
    ],
)
def test_the_command_names_where_quire_came_from(
    record: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if record is None else json.dumps(record)
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(text))
    assert shlex.split(install_command("openai")) == [*PIP, *arguments]


@pytest.mark.parametrize("record", ["", "{"])
def test_a_record_that_cannot_be_read_counts_as_none(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(record))
    assert shlex.split(install_command("openai")) == [*PIP, "--editable", ".[openai]"]


def test_without_an_installation_the_command_is_for_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert shlex.split(install_command("openai")) == [*PIP, "--editable", ".[openai]"]


def test_only_what_is_missing_is_named() -> None:
    assert missing_package("bench", "json", "sys") == ""
    assert missing_package("bench", "json", "no_such_package").startswith(
        "the package no_such_package is not installed"
    )
