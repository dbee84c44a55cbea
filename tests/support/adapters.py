"""LoRA adapters in PEFT's format, made for the oracle's checkpoints, and checkpoints that they are merged into."""

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from quire_engine import LoRARequest
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from support.oracle import Expected

__all__ = ["ALL_LINEAR", "Adapters", "make_adapter", "merge_adapter", "stack_adapter"]

TABLES = ("embed_tokens", "lm_head")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layers_of(base: Path, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The linear layers of a checkpoint with these last parts, by name, and their shapes."""
    tensors = {name: one for path in base.glob("*.safetensors") for name, one in load_file(path).items()}
    names = {name.removesuffix(".weight"): tuple(one.shape) for name, one in tensors.items() if one.dim() == 2}
    return {name: shape for name, shape in names.items() if name.rpartition(".")[2] in targets}


def make_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 8,
    targets: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
    infix: str = "",
    tables: Sequence[str] = (),
    num_tokens: int | None = None,
    **fields: Any,
) -> Path:
    """Write an adapter of random matrices that changes what a checkpoint says.

    Args:
        folder: the adapter's.
        base: the checkpoint's.
        rank: of matrices that no pattern in `fields` names.
        targets: last parts of the names of the layers that it changes; of the embedding and of the head, too.
        seed: of the matrices.
        size: of the change, beside the weights'.
        dtype: of the matrices.
        infix: comes before `.weight` in the names of tensors.
        tables: `embed_tokens` and `lm_head`, if the adapter has its own.
        num_tokens: of these; None: as many as the base has.
        fields: of its configuration.
    """
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank,
        "lora_alpha": 2 * rank, "target_modules": list(targets), "lora_dropout": 0.0, "bias": "none",
        "inference_mode": True, **fields,
    }  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    shapes = layers_of(base, [name for name in targets if name not in TABLES])
    shapes |= {name if name == "lm_head" else f"model.{name}": _table(base).shape for name in targets if name in TABLES}
    for name, (rows, columns) in shapes.items():
        is_embedding = name.endswith("embed_tokens")
        if is_embedding:
            rows, columns = columns, rows
        own_rank, scaling = _rank_and_scaling(config, name)
        a = torch.randn(own_rank, columns, generator=generator)
        b = torch.randn(rows, own_rank, generator=generator)
        b *= size * 0.06 / (scaling * math.sqrt(own_rank))  # as large as usual weights, whatever the rank
        for half, matrix in (("A", a), ("B", b)):
            what = f"lora_embedding_{half}{infix}" if is_embedding else f"lora_{half}{infix}.weight"
            tensors[f"base_model.model.{name}.{what}"] = matrix.to(dtype).contiguous()
        if config.get("use_dora"):
            norms = 0.06 * math.sqrt(columns) * (1 + size * torch.rand(rows, generator=generator))
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = norms.to(dtype)
        if is_embedding:  # which PEFT writes, too
            tensors[f"base_model.model.{name}.base_layer.weight"] = _table(base).to(dtype)
    if tables:
        config.setdefault("modules_to_save", list(tables))
        base_table = _table(base)[:num_tokens]
    for name in tables:
        changed = base_table + size * 0.06 * torch.randn(base_table.shape, generator=generator)
        full_name = name if name == "lm_head" else f"model.{name}"
        tensors[f"base_model.model.{full_name}.weight"] = changed.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge_adapter(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint whose weights are W + scaling · B · A, in float32, as PEFT's `merge_and_unload` does; with
    DoRA of the norms that the adapter has."""
    shutil.copytree(base, folder, symlinks=False)
    config = json.loads((adapter / "adapter_config.json").read_text())
    changes = load_file(adapter / "adapter_model.safetensors")
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in list(tensors):
            layer = name.removesuffix(".weight")
            halves = [
                next(
                    (one for key, one in changes.items() if key.startswith(f"base_model.model.{layer}.lora_{half}")),
                    None,
                )
                for half in "AB"
            ]
            if halves[0] is not None and halves[1] is not None:
                a, b = (half.float() for half in halves if half is not None)
                _, scaling = _rank_and_scaling(config, layer)
                tensors[name] = (tensors[name].float() + scaling * (b @ a)).contiguous()
                magnitude = changes.get(f"base_model.model.{layer}.lora_magnitude_vector")
                if magnitude is not None:
                    tensors[name] *= (magnitude.float() / tensors[name].norm(dim=1))[:, None]
        own = {name: changes.get(f"base_model.model.{name}.weight") for name in ("model.embed_tokens", "lm_head")}
        for name, key in (("model.embed_tokens", "lora_embedding_{}"), ("lm_head", "lora_{}.weight")):
            halves = [changes.get(f"base_model.model.{name}.{key.format(half)}") for half in "AB"]
            if halves[0] is not None and halves[1] is not None and "model.embed_tokens.weight" in tensors:
                change = _rank_and_scaling(config, name)[1] * (halves[1].float() @ halves[0].float())
                if name == "model.embed_tokens":
                    own[name] = tensors[f"{name}.weight"].float() + change.t()
                elif "lm_head.weight" not in tensors:  # tied; another is changed above
                    own[name] = tensors["model.embed_tokens.weight"].float() + change
        if "model.embed_tokens.weight" in tensors and any(one is not None for one in own.values()):
            _replace_tables(folder, tensors, own)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def stack_adapter(folder: Path, adapter: Path) -> Path:
    """Write an adapter of single experts as PEFT has it of transformers' stacks of them, of gate and up together with
    the ranks of both."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, stacks = {}, defaultdict[str, dict[tuple[str, str, int], torch.Tensor]](dict)
    for name, one in load_file(adapter / "adapter_model.safetensors").items():
        match = re.fullmatch(r"(.*\.)\w+\.experts\.(\d+)\.(\w+)\.lora_([AB])\.weight", name)
        if match is None:
            tensors[name] = one
            continue
        projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(match[3], match[3])
        stacks[f"{match[1]}mlp.experts"][projection, match[4], int(match[2])] = one
    for name, own in stacks.items():
        numbers = sorted({number for *_, number in own})
        for projections, infix in ((("gate_proj", "up_proj"), ".base_layer"), (("down_proj",), "")):
            a = [torch.cat([own[one, "A", number] for one in projections]) for number in numbers]
            b = [torch.block_diag(*(own[one, "B", number] for one in projections)) for number in numbers]
            tensors[f"{name}{infix}.lora_A.weight"] = torch.cat(a)
            tensors[f"{name}{infix}.lora_B.weight"] = torch.stack(b, 2).flatten(1)
    of_experts = ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
    config["target_modules"] = [one for one in config["target_modules"] if one not in of_experts]
    config["target_parameters"] = ["mlp.experts.gate_up_proj", "experts.down_proj"]
    config["rank_pattern"] = {r".*\.gate_up_proj": 2 * config["r"]}
    config["alpha_pattern"] = {r".*\.gate_up_proj": 2 * config["lora_alpha"]}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _table(base: Path) -> torch.Tensor:
    """The embedding."""
    tensors = (load_file(path) for path in base.glob("*.safetensors"))
    return next(own["model.embed_tokens.weight"] for own in tensors if "model.embed_tokens.weight" in own).float()


def _replace_tables(folder: Path, tensors: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor | None]) -> None:
    """A tied base's are tied no more, as in PEFT."""
    config = json.loads((folder / "config.json").read_text())
    before = tensors["model.embed_tokens.weight"]
    for name, one in own.items():
        weight = tensors.get(f"{name}.weight", before) if one is None else one
        tensors[f"{name}.weight"] = weight.clone().float()
    config["vocab_size"] = len(weight)
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))


def _rank_and_scaling(config: Mapping[str, Any], layer: str) -> tuple[int, float]:
    def of_pattern(patterns: Mapping[str, float], default: float) -> float:
        return next((one for key, one in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)

    rank = of_pattern(config.get("rank_pattern") or {}, config["r"])
    alpha = of_pattern(config.get("alpha_pattern") or {}, config["lora_alpha"])
    return int(rank), alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of a checkpoint."""

    base: Path
    folders: dict[str, Path]
    merged: Callable[[str], Path]
    """By name, the checkpoint that one is merged into; that of the empty name is the base."""
    known: dict[tuple[Any, ...], "Expected"] = field(default_factory=dict)
    """What was expected before: of a name, a prompt and a number of tokens."""

    def request(self, name: str) -> LoRARequest | None:
        return LoRARequest(name, 1, str(self.folders[name])) if name else None

    def expected(self, name: str, prompts: list[list[int]], num_tokens: int) -> "list[Expected]":
        """What transformers generates with the merged checkpoint."""
        # Imported late: most tests that make adapters do not spend two seconds on transformers.
        from support.oracle import generate_greedily, load_reference

        keys = [(name, *prompt, num_tokens) for prompt in prompts]
        if not self.known.keys() >= {*keys}:
            model = load_reference(self.merged(name) if name else self.base)
            self.known.update(
                (key, generate_greedily(model, prompt, num_tokens)) for key, prompt in zip(keys, prompts, strict=True)
            )
        return [self.known[key] for key in keys]
