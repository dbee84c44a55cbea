"""Layers of multi-token prediction that the oracle's checkpoints have, and what transformers makes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.oracle import load_reference, mtp_layer, mtp_names

__all__ = ["Reference", "make_predictable"]


def make_predictable(source: Path, folder: Path) -> None:
    """Copy a checkpoint, with weights that make the next token depend mostly on the last one, and the layer's drafts
    mostly right."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    size = config["hidden_size"]
    _, embedding_norm, _, projection, last_norm = mtp_names(folder)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= 0.01
    tensors[projection] *= 0.05
    half = tensors[projection][:, :size] if embedding_is_first(config) else tensors[projection][:, size:]
    half += torch.eye(size)
    for name in (embedding_norm, last_norm, "model.norm.weight"):
        tensors[name] = torch.ones(size) - norm_offset(config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def embedding_is_first(config: dict[str, Any]) -> bool:
    return config["architectures"] != ["MiMoForCausalLM"]


def norm_offset(config: dict[str, Any]) -> float:
    """What is added to the weights of norms."""
    return float(config["architectures"][0].startswith("Qwen3"))


class Reference:
    """A checkpoint's model and layer in transformers, float32; the layer is the only one of a model of its own."""

    def __init__(self, folder: Path) -> None:
        self.target = load_reference(folder)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        self._embedding_first = embedding_is_first(config)
        prefix, *names = mtp_names(folder)
        self._eps = config["rms_norm_eps"]
        embedding_norm, hidden_norm, self._projection, last_norm = (tensors[name] for name in names)
        self._embedding_norm, self._hidden_norm = (one + norm_offset(config) for one in (embedding_norm, hidden_norm))
        alone = folder.parent / f"{folder.name}-layer"
        shutil.copytree(folder, alone, dirs_exist_ok=True)
        edit_json(
            alone / "config.json", num_hidden_layers=1, first_k_dense_replace=0, layer_types=["full_attention"],
            num_nextn_predict_layers=0,
        )  # fmt: skip
        own = {
            name.replace(mtp_layer(prefix), "model.layers.0."): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix) and name not in names and "embed" not in name and "shared_head." not in name
        }
        kept = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors}
        save_file(
            {**own, **kept, "model.norm.weight": last_norm}, alone / "model.safetensors", metadata={"format": "pt"}
        )
        self._layer = load_reference(alone)
        self._drafts: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """The target's, [T, E], after its last norm."""
        states: Any = self.target(torch.tensor([token_ids]), output_hidden_states=True)
        return torch.as_tensor(states.hidden_states[-1][0])

    @torch.inference_mode()
    def __call__(self, token_ids_T: torch.Tensor, hidden_TE: torch.Tensor) -> torch.Tensor:
        """The layer's output, [T, E], of the tokens after the positions, and the hidden states of these."""
        size = (hidden_TE.shape[1],)
        embedded_TE = self.target.get_input_embeddings()(token_ids_T)
        both = [
            F.rms_norm(embedded_TE, size, self._embedding_norm, self._eps),
            F.rms_norm(hidden_TE, size, self._hidden_norm, self._eps),
        ]
        inputs_TE = torch.cat(both if self._embedding_first else both[::-1], dim=-1) @ self._projection.T
        return torch.as_tensor(self._layer.model(inputs_embeds=inputs_TE[None]).last_hidden_state[0])

    @torch.inference_mode()
    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.target.get_output_embeddings()(out_SE))

    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """So many drafts after these tokens, greedily."""
        drafts = self._drafts.setdefault((*token_ids,), [])
        if len(drafts) < number:
            hidden_TE, known = self.hidden(token_ids)[:-1], list(token_ids)
            drafts.clear()
            for _ in range(number):
                out_TE = self(torch.tensor(known[1:]), hidden_TE)
                drafts.append(int(self.logits(out_TE[-1:]).argmax()))
                hidden_TE, known = torch.cat((hidden_TE, out_TE[-1:])), [*known, drafts[-1]]
        return drafts[:number]
