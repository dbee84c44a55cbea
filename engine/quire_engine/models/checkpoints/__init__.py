"""The file formats of checkpoints. Does not use torch until a tensor is read."""

import os
from pathlib import Path

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.base import (
    BAND,
    FLOATING,
    INDICES,
    CheckpointReader,
    StoredTensor,
    is_of_text_model,
)
from quire_engine.models.checkpoints.files import brief
from quire_engine.models.checkpoints.gguf import SPLIT, GgufReader
from quire_engine.models.checkpoints.safetensors import SafetensorsReader, weight_files

__all__ = [
    "BAND", "FLOATING", "INDICES", "CheckpointReader", "StoredTensor", "is_of_text_model", "open_checkpoint",
    "weight_files",
]  # fmt: skip


def open_checkpoint(path: Path, setting: str = "model") -> CheckpointReader:
    """The reader of a checkpoint, by its file format; no file is opened yet. Raises CheckpointError if there is
    nothing, or the folder has several models.

    Args:
        path: a folder of safetensors with their `config.json`, a GGUF file, or a folder without `config.json` that has
            one model in GGUF.
        setting: that names the path, for messages.
    """
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(
                f"{setting}: there is no folder {path}; give the path of a Hugging Face checkpoint or of a GGUF file"
            )
        return GgufReader(path)
    if os.path.lexists(path / "config.json"):
        return SafetensorsReader(path)
    # A file for pictures may be beside the model, and all files of a split one are one model.
    names = sorted(file.name for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    models = {match[1] if (match := SPLIT.fullmatch(name)) else name: name for name in reversed(names)}
    if len(models) > 1:
        raise CheckpointError(f"{path}: there are several models ({brief(names)}); give the path of one of the files")
    return GgufReader(path / names[0]) if models else SafetensorsReader(path)
