"""Multi-token prediction: a layer of the checkpoint itself that predicts the token after the next (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2).

Its input at position p is the token at p + 1, which is known there, and a hidden state of position p: the target's
after its last norm where the target has computed the position, else the layer's own output after `norm`. ::

    token ── embed ── pre_fc_norm_embedding ─┐
                                             ├─ fc ─ decoder layer ─ norm ─┬─ lm_head
    hidden state ────── pre_fc_norm_hidden ──┘                             └─ next hidden state

Embedding and output matrix are the target's: copies of them in the checkpoint are not read. The first layer drafts all
tokens, as in vLLM, where a checkpoint has several. It is not cut into slices: one rank has all of it, and computes
alone.
"""

from dataclasses import replace
from pathlib import Path

import torch
from quire_kernels import add_residual, rms_norm

from quire_engine.device.transfer import CPU
from quire_engine.errors import CheckpointError
from quire_engine.models.base import OUTPUT, normed_pairs
from quire_engine.models.checkpoints import StoredTensor
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import ColumnParallel, Weight, load_targets
from quire_engine.models.linear import linear_methods
from quire_engine.models.loader import (
    META,
    bounded_config,
    build,
    check_tensors,
    check_weights,
    is_zero_bias,
    load_tensors,
    randomize,
)
from quire_engine.models.step_context import StepContext

PREFIX = "mtp."
"""Prefix of its tensors' names in the model."""
VOCABULARIES = ("embed_tokens.", "lm_head.")


class MultiTokenPredictor(Decoder):
    """The layer, as a decoder of one layer.

    Args:
        config: of the target; it must have `MTPOptions`.
        max_model_len: of the target.
        target: whose embedding and output matrix it uses as far as that rank has all of them; None: it has its own.
    """

    tapped_layers = (OUTPUT,)
    target_ids = None

    def __init__(self, config: CheckpointConfig, max_model_len: int, target: Decoder | None = None) -> None:
        mtp = config.options.mtp
        assert mtp is not None
        super().__init__(replace(config, options=replace(config.options, layers=(mtp.layer,))), max_model_len)
        self._target_embed = self._target_logits = None
        if target is not None and target.parallel.tensor_parallel_size == 1:
            if hasattr(target, "embed_tokens"):
                self._target_embed = target.embed
                del self.embed_tokens
            self._target_logits, self.lm_head = target.compute_logits, None
        size, norms = config.hidden_size, config.options.norms
        self.embedding_first = mtp.embedding_first
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (Weight.of_norm(size, norms) for _ in range(2))
        self.fc = ColumnParallel(2 * size, {"fc": size}, False, self.parallel)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids_T) if self._target_embed is None else self._target_embed(token_ids_T)

    def features(self, states_TE: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as they are."""
        return states_TE

    def run_layer(
        self,
        embedded_TE: torch.Tensor,
        hidden_TE: torch.Tensor,
        context: StepContext,
        kv_cache: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        norms = self.pre_fc_norm_embedding, self.pre_fc_norm_hidden
        pairs = normed_pairs(embedded_TE, hidden_TE, norms, self.eps, self.embedding_first)
        out, residual = self.run_layers(self.fc(pairs), None, context, [kv_cache])
        add_residual(out, residual, self.residual_multiplier)
        return rms_norm(residual, self.norm.weight, self.eps, out=hidden_TE)

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """Results of `run_layer`, [S, E] -> [S, V] float32."""
        logits = (self._target_logits or self.compute_logits)(out_SE)
        assert logits is not None
        return logits


def check_mtp(folder: Path, config: CheckpointConfig, *, is_dummy: bool = False) -> dict[str, StoredTensor]:
    """Check that a checkpoint has the layer.

    Args:
        folder: of the target.
        config: of the target.
        is_dummy: its weight files are not read.

    Returns:
        The tensors that `MultiTokenPredictor` may read, by its names; none if `is_dummy`.

    Raises:
        CheckpointError: there is no such layer, or a tensor is missing or of another shape.
    """
    options, where, mend = config.options, "speculative_config: method is 'mtp'", "draft with another method"
    if options.mtp is None:
        raise CheckpointError(f"{where}; {folder} has no layer of multi-token prediction by its config.json: {mend}")
    if is_dummy:
        return {}
    stored = check_weights(folder, config)
    own = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items() if name.startswith(PREFIX)}
    if not own:
        raise CheckpointError(
            f"{where}; {folder} holds no tensors of the layer that its config.json names, so they were left out when "
            f"it was made: {mend}"
        )

    def is_ignored(name: str) -> bool:
        """Further layers, copies of the target's matrices, and what `check_weights` ignores."""
        if any(part in name for part in options.skipped):
            return True
        is_copy = any(part in f".{name}" for part in (".embed_tokens.", ".lm_head.", ".shared_head.head."))
        is_further = name.startswith("layers.") and not name.startswith("layers.0.")
        return is_copy or is_further or name.endswith("rotary_emb.inv_freq") or is_zero_bias(name, own)

    own |= {name: tensor for name, tensor in stored.items() if name.startswith(VOCABULARIES)}
    alone = replace(options, layers=(options.mtp.layer,))
    (layer,) = bounded_config(replace(config, options=alone), len(own)).options.layers
    bounded = replace(config, options=replace(options, mtp=replace(options.mtp, layer=layer)))
    methods = linear_methods(config.weight_format, None, own)
    module = build(lambda: MultiTokenPredictor(bounded, 1), torch.float32, META, methods)
    check_tensors(folder, own, load_targets(module), is_ignored)
    return own


def load_mtp(
    folder: Path,
    config: CheckpointConfig,
    target: Decoder,
    max_model_len: int,
    quantization: str | None = None,
    device: torch.device = CPU,
    *,
    is_dummy: bool = False,
) -> MultiTokenPredictor:
    """Load the layer, on a rank of the target's last stage. Raises CheckpointError like `check_mtp`, or if a weight is
    wrong.

    Args:
        folder: of the target.
        config: of the target.
        target: this rank's part of it.
        max_model_len: of the target.
        quantization: the setting.
        device: of the target.
        is_dummy: its weights are random, as the target's are.
    """
    tensors = check_mtp(folder, config, is_dummy=is_dummy)
    methods = linear_methods(config.weight_format, quantization, None if is_dummy else tensors)
    layer = build(lambda: MultiTokenPredictor(config, max_model_len, target), target.dtype, device, methods)
    if is_dummy:
        randomize(layer)
    else:
        load_tensors(layer, tensors)
    layer.pack()
    return layer.eval()
