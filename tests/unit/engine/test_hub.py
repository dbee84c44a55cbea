"""Checkpoints named as on the Hub are taken from its cache; the Hub is asked only for others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from quire_cli.model_repository import write_model
from quire_engine import EngineConfig
from quire_engine.config.hub import is_hub_name
from quire_engine.errors import CheckpointError
from quire_engine.models import check_checkpoint
from support.checkpoints import make_small_checkpoint

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with two revisions of `org/small`, and no way to the Hub."""
    cache = tmp_path / "cache"
    repository = cache / "models--org--small"
    (repository / "refs").mkdir(parents=True)
    for name, commit in COMMITS.items():
        make_small_checkpoint(repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return cache


@pytest.mark.parametrize(
    ("model", "is_one"),
    [("org/small", True), ("org-1/Small_2.0", True), ("./org/small", False), ("/org/small", False), ("small", False),
     ("a/b/c", False), ("../small", False), ("org/", False), ("org/..", False)],
)  # fmt: skip
def test_names_of_the_hub(model: str, is_one: bool, cache: Path) -> None:
    assert is_hub_name(model) == is_one


@pytest.mark.parametrize(
    ("settings", "commit"),
    [({}, "main"), ({"revision": "main"}, "main"), ({"revision": "v2"}, "v2"), ({"revision": COMMITS["v2"]}, "v2")],
)
def test_a_checkpoint_in_the_cache_is_there_without_the_hub(
    settings: dict[str, Any], commit: str, cache: Path, tmp_path: Path
) -> None:
    folder = cache / "models--org--small" / "snapshots" / COMMITS[commit]
    for base_dir in (None, tmp_path):
        config = EngineConfig.from_settings({"model": "org/small", **settings}, base_dir=base_dir)
        assert Path(config.model.model) == folder
    check_checkpoint(folder)


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path / "org" / "small")
    assert Path(EngineConfig.from_settings({"model": "org/small"}, base_dir=tmp_path).model.model) == folder
    with pytest.raises(ValueError, match="revision is 'v2'; it must be unset: model is a folder"):
        EngineConfig.from_settings({"model": "org/small", "revision": "v2"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": "org/none"},
            "there is no folder org/none, the Hub's cache .* cannot be downloaded: .*HF_HUB_OFFLINE",
        ),
        ({"model": "org/small", "revision": "v3"}, "no such checkpoint of revision 'v3', and it cannot be downloaded"),
    ],
)
def test_what_is_not_there_is_said_with_the_reason(settings: dict[str, Any], message: str, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        EngineConfig.from_settings(settings)


@pytest.mark.parametrize("is_begun", [False, True])
def test_only_what_is_not_in_the_cache_is_downloaded_and_no_code(
    is_begun: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local: Callable[..., str] = huggingface_hub.snapshot_download
    downloads = []

    def snapshot_download(name: str, *, local_files_only: bool, **options: Any) -> str:
        if local_files_only:
            return local(name, local_files_only=True, **options)
        downloads.append((name, options))
        return "/downloaded"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    if is_begun:  # with nothing but a tokenizer
        (cache / "models--org--small" / "snapshots" / COMMITS["main"] / "model.safetensors").unlink()
    name = "org/small" if is_begun else "org/other"
    assert EngineConfig.from_settings({"model": name}).model.model == "/downloaded"
    ((asked, options),) = downloads
    assert (asked, options["revision"]) == (name, None)
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in options["allow_patterns"])


def test_a_model_that_is_added_is_the_folder_of_its_revision(cache: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models", Path("org/small"), settings={"revision": "v2"})
    assert folder.name == "small"
    written = (folder / "1" / "model.json").read_text()
    assert COMMITS["v2"] in written
    assert "revision" not in written
