"""The files that tinypy was trained with: the script that trained it picks them out of the interpreter's library."""

import importlib.util
import sys
import sysconfig
from pathlib import Path

__all__ = ["training_files"]

SCRIPT = Path(__file__).resolve().parents[2] / "training" / "train.py"


def training_files() -> list[str]:
    """Their texts: those of another Python than the one it was trained with are much the same."""
    spec = importlib.util.spec_from_file_location("train_tinypy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    train = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    texts: list[str] = train.collect_corpus(Path(sysconfig.get_paths()["stdlib"])).training
    return texts
