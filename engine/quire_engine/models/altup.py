"""A decoder with several residual streams, of which each layer computes one and predicts and corrects the others
(AltUp, Baykal et al. 2023, https://arxiv.org/abs/2301.13310), with a learned residual of low rank beside attention
(LAuReL, Menghani et al. 2024, https://arxiv.org/abs/2411.07501), as in Gemma 3n.

One layer, in calls; P streams come and go, and x is the active one::

    mix_streams (predict) ─ x ─ rms_norm ┬ qkv_proj ─ … ─ o_proj ─ rms_norm ─┐
                                         ├ linear_left ─ linear_right ─ rms_norm ┴ (x + Σ) / √2
    rms_norm ─ gate_up_proj ─ … ─ down_proj ─ rms_norm ─ + ─ minus x as predicted
    mix_streams (correct) ─ x ─ per_layer_input_gate ─ activation · input ─ per_layer_projection ─ rms_norm
                                                                         added to all streams but the first
"""

from collections.abc import Sequence

import torch
from quire_kernels import activate_and_mul, add_residual, add_rms_norm, match_rms, mix_streams, rms_norm
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.models.base import OUTPUT
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import ALONE, STREAM_BITS, Decoder, DecoderLayer, Features
from quire_engine.models.layers.experts import Router
from quire_engine.models.layers.parallel import (
    ColumnParallel,
    Weight,
    receive_activations,
    send_activations,
)
from quire_engine.models.layers.rope import RopeTables
from quire_engine.models.options import AltUpOptions, LayerOptions
from quire_engine.models.step_context import KVCaches, StepContext

FLOOR = 1e-5
"""Of the mean square of a stream that gets the magnitude of another."""
LEAST = 2.0**-126
"""The same floor for a stream that is its own model: `match_rms` then copies it."""


class AltUp(nn.Module):
    """How a layer mixes the streams, as its active stream says."""

    def __init__(self, config: CheckpointConfig, options: AltUpOptions) -> None:
        super().__init__()
        size, number, self.eps = config.hidden_size, options.num_streams, config.rms_norm_eps
        self.modality_router = Router(size, "modality_router", number)
        self.router_norm = Weight.of_norm(size, config.options.norms)
        self.prediction_coefs = Weight(number**2, number, dtype=torch.float32)
        self.correction_coefs = Weight(number, number, dtype=torch.float32)
        self.correct_output_scale = Weight(size)

    def pack(self) -> None:
        number = len(self.correction_coefs.weight)
        self._norm_E = self.router_norm.weight / len(self.router_norm.weight)
        self._prediction_PPM = self.prediction_coefs.weight.view(number, number, number)
        self._correction_P1M = self.correction_coefs.weight.view(number, 1, number)

    def _routes(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        routes_TM: torch.Tensor = self.modality_router(rms_norm(hidden_TE, self._norm_E, self.eps))
        return routes_TM

    def predict(self, streams_TPE: torch.Tensor, active: int) -> torch.Tensor:
        """[T, P, E] → [T, P, E], what the layer will make of them."""
        return mix_streams(streams_TPE, streams_TPE, self._routes(streams_TPE[:, active]), self._prediction_PPM)

    def correct(self, predicted_TPE: torch.Tensor, computed_TE: torch.Tensor, active: int) -> torch.Tensor:
        """The prediction, corrected by what the layer has made of the active stream; overwrites that. [T, P, E]."""
        routes_TM = self._routes(computed_TE)
        add_residual(predicted_TPE[:, active], computed_TE, -1.0)
        return mix_streams(predicted_TPE, computed_TE.unsqueeze(1), routes_TM, self._correction_P1M, 1.0)


class Laurel(nn.Module):
    """A product of low rank, normed."""

    def __init__(self, config: CheckpointConfig, rank: int) -> None:
        super().__init__()
        size, self.eps = config.hidden_size, config.rms_norm_eps
        self.linear_left = ColumnParallel(size, {"linear_left": rank}, False, ALONE)
        self.linear_right = ColumnParallel(rank, {"linear_right": size}, False, ALONE)
        self.post_laurel_norm = Weight.of_norm(size, config.options.norms)

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] → [T, E]."""
        return rms_norm(self.linear_right(self.linear_left(hidden_TE)), self.post_laurel_norm.weight, self.eps)


class AltUpLayer(DecoderLayer):
    """A layer with what mixes its streams, and its product of low rank."""

    def __init__(
        self, config: CheckpointConfig, options: LayerOptions, parallel: ParallelState, tables: RopeTables
    ) -> None:
        super().__init__(config, options, parallel, tables)
        assert config.options.altup is not None
        self.altup, self.laurel = AltUp(config, config.options.altup), Laurel(config, config.options.altup.laurel_rank)

    def pack(self) -> None:
        super().pack()
        self.altup.pack()


class StreamProjection(ColumnParallel):
    """A projection of a stream, or of the embedding to streams; every rank has all of it."""

    activation_bits = STREAM_BITS

    def __init__(self, size: int, names: Sequence[str]) -> None:
        super().__init__(size, dict.fromkeys(names, size), False, ALONE)


class AltUpDecoder(Decoder):
    """A `Decoder` whose residual stream is [T, P, E] between the layers. Every rank has all streams."""

    layer_class = AltUpLayer

    def __init__(self, config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> None:
        super().__init__(config, max_model_len, parallel)
        assert config.options.altup is not None
        self.altup, size = config.options.altup, config.hidden_size
        others = range(self.altup.num_streams - 1)
        if parallel.is_first_stage:
            self.stream_projections = StreamProjection(size, [f"altup_projections.{i}" for i in others])
        if parallel.is_last_stage:
            self.altup_unembed_projections = nn.ModuleList(StreamProjection(size, [str(i)]) for i in others)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        context: StepContext,
        kv_caches: KVCaches,
        embedded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """[T] -> [T, E], or None. Stages send the streams and the embedding."""
        size, streams_TPE = self.hidden_size, None
        if self.parallel.is_first_stage:
            hidden = self._embed_prompt(token_ids_T, embedded)
        else:
            *streams, embedding_TE = receive_activations(
                self.parallel, self.altup.num_streams + 1, len(token_ids_T), size, self.dtype
            )
            streams_TPE = torch.stack(streams, 1)
            hidden = torch.cat((embedding_TE, self._embed_inputs(token_ids_T)), 1)
        hidden, streams_TPE = self.run_layers(hidden, streams_TPE, context, kv_caches)
        if self.parallel.is_last_stage:
            return self.final_norm(hidden, streams_TPE, context)
        send_activations(self.parallel, *streams_TPE.unbind(1), hidden[:, :size])
        return None

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        context: StepContext,
        kv_caches: KVCaches,
        features: Features | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordableLM`; returns its input and the streams, [T, P, E], of which the last stage makes one."""
        assert features is None
        each = self._each_mixer(context, kv_caches)
        embedding_TE, inputs_TI = hidden_TE.tensor_split([self.hidden_size], 1)
        inputs = dict(zip(self._numbers, self._complete_inputs(embedding_TE, inputs_TI), strict=True))
        streams_TPE = self._streams(embedding_TE) if residual_TE is None else residual_TE
        active = self.altup.active
        for number, layer in self.layers.items():
            assert isinstance(layer, AltUpLayer)
            assert layer.mlp is not None
            norms = layer.norms
            if self.feature_taps is not None:
                self.feature_taps.store(int(number), streams_TPE[:, active], context)
            predicted_TPE = layer.altup.predict(streams_TPE, active)
            normed_TE = self._norm(predicted_TPE[:, active], layer.norm(norms.before_attention))
            attended_TE = self._norm(layer.mix(normed_TE, each), layer.norm(norms.after_attention))
            add_residual(layer.laurel(normed_TE), normed_TE)
            add_residual(attended_TE, residual_TE := normed_TE)
            hidden = self._add_norm(predicted_TPE[:, active], residual_TE, layer.norm(norms.before_mlp), 2**-0.5)
            add_residual(self._norm(layer.mlp(hidden), layer.norm(norms.after_mlp)), residual_TE)
            streams_TPE = layer.altup.correct(predicted_TPE, residual_TE, active)
            computed_TE = streams_TPE[:, active]
            if self.altup.scales_output:
                scale_TE = layer.altup.correct_output_scale.weight.expand(computed_TE.shape)
                computed_TE = activate_and_mul(computed_TE, "none", scale_TE)
            contribution_TE = self._layer_input(layer, computed_TE, inputs[number])
            for i in range(1, self.altup.num_streams):
                add_residual(contribution_TE, streams_TPE[:, i])
        return hidden_TE, streams_TPE

    def _streams(self, embedding_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] → [T, P, E]: the embedding, and projections of it, of the same magnitude."""
        streams_TPE = embedding_TE.new_empty(len(embedding_TE), self.altup.num_streams, self.hidden_size)
        projected: Sequence[torch.Tensor] = self.stream_projections(embedding_TE).split(self.hidden_size, 1)
        match_rms(embedding_TE, embedding_TE, LEAST, streams_TPE[:, 0])
        for i, one in enumerate(projected, 1):
            match_rms(one, embedding_TE, FLOOR, streams_TPE[:, i])
        return streams_TPE

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor, context: StepContext) -> torch.Tensor:
        """[T, P, E] → [T, E]: the norm of the mean of the streams, of which all but the first are projected and get its
        magnitude. The sum has the norm of the mean if the epsilon is multiplied by P²."""
        first_TE = residual_TE[:, 0]
        total_TE, *others = (
            match_rms(projection(residual_TE[:, i]), first_TE, FLOOR)
            for i, projection in enumerate(self.altup_unembed_projections, 1)
        )
        for other_TE in others:
            add_residual(other_TE, total_TE)
        eps = self.eps * self.altup.num_streams**2
        hidden_TE = add_rms_norm(first_TE, total_TE, self.norm.weight, eps)
        if self.feature_taps is not None:
            self.feature_taps.store(OUTPUT, hidden_TE, context)
        return hidden_TE
