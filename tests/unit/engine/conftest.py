"""Checkpoints and their expected outputs, made once for all processes of a run; workers that fail on demand."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.worker.fault_injection import FAULT_INJECTION_VARIABLE
from quire_kernels import cpu
from support.emulated_instructions import selected
from support.faults import put_fault
from support.oracle import CHECKPOINTS, Expected, expected_outputs, make_checkpoint, make_prompts
from support.pictures import make_picture_checkpoint
from transformers import AutoConfig

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"


MADE_VARIABLE = "QUIRE_TESTS_MADE"
"""The folder of what is made once, for processes that are started by tests."""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A file or folder by name, made by the first process that wants it."""
    if MADE_VARIABLE not in os.environ:
        base = tmp_path_factory.getbasetemp()
        os.environ[MADE_VARIABLE] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made")
    folder = Path(os.environ[MADE_VARIABLE])

    def get(name: str, make: Callable[[Path], object]) -> Path:
        path, unfinished = folder / name, folder / f"{name}.unfinished"
        folder.mkdir(exist_ok=True)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(unfinished)
                unfinished.rename(path)
        return path

    return get


@pytest.fixture(scope="session")
def checkpoint(made: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[str], Path]:
    """Folder of a checkpoint by name: one of the oracle's seeded random ones, or the demo model."""

    @cache
    def make(name: str) -> Path:
        if name == "tinypy":
            return TINYPY
        assert name in CHECKPOINTS
        return made(name, lambda folder: make_checkpoint(folder, name, load_tokenizer(TINYPY)))

    return make


@pytest.fixture(scope="session")
def workload(
    checkpoint: Callable[[str], Path], made: Callable[[str, Callable[[Path], object]], Path]
) -> Callable[[str], tuple[list[list[int]], list[int], list[Expected]]]:
    """64 prompts of mixed lengths, or 24, how many tokens each gets, and what transformers makes of them."""

    @cache
    def make(name: str) -> tuple[list[list[int]], list[int], list[Expected]]:
        vocab_size = AutoConfig.from_pretrained(checkpoint(name)).get_text_config().vocab_size
        num_prompts = 24 if "num_experts_per_tok" in CHECKPOINTS.get(name, {}) else 64  # experts take transformers long
        prompts = make_prompts(num_prompts, vocab_size, max_length=120)
        lengths = [8 + (i * 7) % 25 for i in range(len(prompts))]

        def ask_transformers(file: Path) -> None:
            said = expected_outputs(name, checkpoint(name), prompts, lengths)
            file.write_text(json.dumps([asdict(one) for one in said]))

        said = json.loads(made(f"{name}.json", ask_transformers).read_text())
        return prompts, lengths, [Expected(**one) for one in said]

    return make


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Has workers fail; see `quire_engine.worker.fault_injection`."""
    file = tmp_path / "fault.json"
    monkeypatch.setenv(FAULT_INJECTION_VARIABLE, str(file))

    def write(**fields: Any) -> Path:
        put_fault(file, **fields)
        return file

    return write


@pytest.fixture(params=["avx512", "avx2", "torch"])
def forced_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the kernels' ways that this machine has and would not choose by itself. The kernels' own tests hold every
    instruction set to the definition of its op; with this the whole engine is tested on it."""
    name: str = request.param
    if name == cpu.status().instruction_set:
        pytest.skip(f"{name} is chosen without force")
    with selected(name):
        assert cpu.status().instruction_set == (None if name == "torch" else name)
        yield name


@pytest.fixture(scope="session")
def picture_checkpoint(made: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[str], Path]:
    """Folder of a seeded random checkpoint that takes images, by its name in `support.pictures`."""

    def make(name: str) -> Path:
        return made(f"picture-{name}", lambda folder: make_picture_checkpoint(folder, name, load_tokenizer(TINYPY)))

    return make
