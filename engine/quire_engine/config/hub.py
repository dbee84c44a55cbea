"""Checkpoints named as on the Hugging Face Hub: from its cache on this machine, else downloaded into it."""

import re
from pathlib import Path

from quire_engine.errors import CheckpointError, cut

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WEIGHTS = "*.safetensors"
FILES = ["*.json", WEIGHTS, "*.model", "*.txt", "*.jinja"]
"""Files that are read of a checkpoint: no code, and no pickled weights."""
OTHERS = ["*/*"]
"""Files in folders: other forms of the same weights."""


def is_hub_name(model: str, base_dir: Path | None = None) -> bool:
    """Whether a model is named `organisation/name`, and no folder has that name.

    Args:
        model: the setting.
        base_dir: the base of a relative folder; unset: the working directory.
    """
    is_name = _NAME.fullmatch(model) is not None and not model.endswith(".gguf")
    return is_name and not ((base_dir or Path()) / model).exists()


def fetch_checkpoint(name: str, revision: str | None = None, *, weights: bool = True) -> str:
    """The folder of a checkpoint in the Hub's cache (`HF_HOME`); connects to the Hub only if it is not there.

    Args:
        name: `organisation/name`.
        revision: a branch, tag or commit; unset: the main branch, as it was when it was downloaded.
        weights: whether they are needed; if not, they are not downloaded.

    Raises:
        CheckpointError: it is not in the cache, and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    ignored = OTHERS if weights else [*OTHERS, WEIGHTS]

    def download(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=FILES, ignore_patterns=ignored,
                local_files_only=local_files_only,
            )
        )  # fmt: skip

    try:
        try:
            folder = download(local_files_only=True)
        except LocalEntryNotFoundError:
            folder = None
        # Something else may have needed the tokenizer alone.
        if folder is None or not any(folder.glob(WEIGHTS if weights else "config.json")):
            folder = download(local_files_only=False)
    except Exception as error:  # the library raises whatever its HTTP client raises
        reason = cut(" ".join(str(error).split()))
        raise CheckpointError(
            f"model: there is no folder {name}, the Hub's cache on this machine has no such checkpoint"
            f"{'' if revision is None else f' of revision {revision!r}'}, and it cannot be downloaded: {reason}"
        ) from error
    return str(folder)
