"""What of the environment stands for a setting."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from quire_backend import settings as settings_module
from quire_backend.settings import load_engine_config, name_of_settings

ENDPOINT = "http://collector:4317"


def otlp_endpoint(folder: Path, **settings: Any) -> str | None:
    (folder / "model.json").write_text(json.dumps({"model": "/m", **settings}))
    return load_engine_config(folder).frontend.otlp_endpoint


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)
    monkeypatch.setattr(settings_module, "_has_otel", lambda: True)


def test_opentelemetrys_own_variable_stands_for_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert otlp_endpoint(tmp_path) == ENDPOINT
    assert otlp_endpoint(tmp_path, otlp_endpoint="http://own:4317") == "http://own:4317"
    assert otlp_endpoint(tmp_path, otlp_endpoint=None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    assert otlp_endpoint(tmp_path) is None


def test_the_variable_alone_asks_for_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settings_module, "_has_otel", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert otlp_endpoint(tmp_path) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text


def test_packages_are_looked_for_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.undo()
    monkeypatch.setattr(settings_module, "find_spec", missing)
    assert settings_module._has_otel() is False


def test_other_settings_have_another_name_and_the_token_is_no_part_of_it(tmp_path: Path) -> None:
    def name_of(**settings: Any) -> str:
        (tmp_path / "model.json").write_text(json.dumps({"model": "/m", **settings}))
        return name_of_settings(load_engine_config(tmp_path))

    assert name_of() == name_of(introspection_token="some sixteen letters")
    names = {name_of(), name_of(max_num_seqs=7), name_of(slo={"default": {"ttft_ms": 7}}), name_of(model="/n")}
    assert len(names) == 4
