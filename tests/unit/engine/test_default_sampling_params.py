"""Default sampling parameters: the checkpoint's file, another folder's, and what overrides them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from quire_engine import SamplingParams
from quire_engine.config import EngineConfig
from quire_engine.errors import CheckpointError
from quire_engine.frontend.default_sampling_params import DefaultSamplingParams, read_default_sampling_params

STORED = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "repetition_penalty": 1.1, "max_new_tokens": 40,
    "do_sample": False, "eos_token_id": [1, 2], "transformers_version": "5",
}  # fmt: skip
READ = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 40}


def defaults_of(folder: Path, stored: Any = STORED, **settings: Any) -> DefaultSamplingParams:
    folder.mkdir(exist_ok=True)
    if stored is not None:
        (folder / "generation_config.json").write_text(json.dumps(stored))
    config = EngineConfig.from_settings({"model": str(folder / "."), **settings}, base_dir=folder)
    return read_default_sampling_params(
        config.model.model, config.frontend.generation_config, config.frontend.override_generation_config
    )


def test_the_checkpoints_own_defaults_hold_and_the_log_says_so(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="quire_engine"):
        defaults = defaults_of(tmp_path)
    assert (defaults.values, defaults.max_tokens_limit) == (READ, None)
    assert defaults.params == SamplingParams(**READ)
    (record,) = caplog.records
    assert "temperature 0.6" in record.getMessage()
    assert str(tmp_path / "generation_config.json") in record.getMessage()


@pytest.mark.parametrize(
    ("stored", "settings"),
    [(None, {}), ({}, {}), ({"eos_token_id": 1}, {}), (STORED, {"generation_config": "vllm"}),
     (STORED, {"override_generation_config": dict.fromkeys(STORED.keys() & {*READ, "max_new_tokens"})}),
     (None, {"generation_config": None, "override_generation_config": None})],
)  # fmt: skip
def test_without_defaults_the_neutral_values_hold(
    tmp_path: Path, caplog: Any, stored: Any, settings: dict[str, Any]
) -> None:
    with caplog.at_level(logging.INFO, logger="quire_engine"):
        defaults = defaults_of(tmp_path, stored, **settings)
    assert defaults == DefaultSamplingParams()
    assert defaults.params == SamplingParams()
    assert caplog.records == []


def test_another_folders_defaults_and_what_overrides_them(tmp_path: Path) -> None:
    defaults_of(tmp_path / "other", {"temperature": 0.3, "max_new_tokens": 9})
    defaults = defaults_of(tmp_path, generation_config="other", override_generation_config={"top_k": 3})
    assert defaults.values == {"temperature": 0.3, "top_k": 3, "max_tokens": 9}
    assert defaults.max_tokens_limit == 9
    override = {"max_new_tokens": 5, "temperature": None}
    defaults = defaults_of(tmp_path, override_generation_config=override)
    assert defaults.values == {name: value for name, value in READ.items() if name != "temperature"} | {"max_tokens": 5}
    assert defaults.max_tokens_limit == 5
    with pytest.raises(CheckpointError, match="there is no generation_config"):
        defaults_of(tmp_path, generation_config=str(tmp_path / "nowhere"))


def test_what_a_request_says_wins_and_a_conversation_may_be_long(tmp_path: Path) -> None:
    defaults = defaults_of(tmp_path)
    sampling = {name: value for name, value in READ.items() if name != "max_tokens"}
    assert defaults.complete({}) == SamplingParams(**sampling), "a prompt without max_tokens is a short one"
    assert defaults.complete({}, is_chat=True) == SamplingParams(**READ)
    assert defaults.complete({"temperature": 0.0, "max_tokens": 90}, is_chat=True) == SamplingParams(
        **READ | {"temperature": 0.0, "max_tokens": 90}
    )
    assert DefaultSamplingParams().complete({}, is_chat=True).max_tokens is None


def test_a_limit_holds_for_every_request(tmp_path: Path) -> None:
    defaults = defaults_of(tmp_path, override_generation_config={"max_new_tokens": 12})
    assert defaults.complete({}).max_tokens == 12
    assert defaults.complete({}, is_chat=True).max_tokens == 12
    assert defaults.complete({"max_tokens": 900}).max_tokens == 12
    assert defaults.complete({"max_tokens": 7}).max_tokens == 7
    with pytest.raises(ValueError, match="min_tokens is 13; it must be at most max_tokens=12"):
        defaults.complete({"max_tokens": 900, "min_tokens": 13})


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", "0.6"), ("temperature", float("nan")), ("temperature", True),
     ("top_p", 1.5), ("top_k", 2.5), ("top_k", 10**30), ("repetition_penalty", []), ("min_p", {}),
     ("max_new_tokens", 0), ("skip_special_tokens", 1)],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.json: {field} is .*generation_config to 'vllm'"):
        defaults_of(tmp_path, {field: value})
    assert defaults_of(tmp_path, {field: value}, generation_config="vllm") == DefaultSamplingParams()
    with pytest.raises(ValueError, match=f"override_generation_config: {field} is "):
        defaults_of(tmp_path, STORED, override_generation_config={field: value})


@pytest.mark.parametrize("content", ["[]", "3", "{", ""])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config.json: not (a )?JSON"):
        defaults_of(tmp_path, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"generation_config": ""}, "'auto', 'vllm', or the path of a folder"), ({"generation_config": 3}, "folder"),
     ({"override_generation_config": []}, "an object"), ({"override_generation_config": "x"}, "an object"),
     ({"override_generation_config": {"tempature": 1}}, "holds 'tempature'; known are temperature,")],
)  # fmt: skip
def test_bad_settings_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} .*{message}"):
        defaults_of(tmp_path, **settings)
