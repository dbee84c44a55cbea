"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

All heads share one row per token in the cache. It holds what carries the token's position, R features, and a latent
vector of C features, which the other N features of each head's key, and its value of V features, are products of::

    cache row                 k = [ rope R │ latent C ]          D = R + C features of the only KV head
    head h's key              [ rope R │ W_K[h] latent ]         W_K[h] is N × C
    head h's value            W_V[h] latent                      W_V[h] is V × C

Neither is ever computed. A head's product of query and key is the product of the row and ``[ q_rope │ W_K[h]ᵀ q ]``,
and the weighted sum of values is ``W_V[h]`` times the weighted sum of rows. So this is attention of H query heads to
one key head, which `paged_attention` computes as any other ("absorption", section 2.1.3)::

    hidden ─► q_a ─ norm ─► q_b ─► per head: identity │ W_Kᵀ ─► rotate R ─┐
           └► kv_a ─ norm of the latent ─► rotate R ─► cache ─────────────┴► attention ─► per head: W_V ─► o_proj

The checkpoint's order of features is another: R comes last in a head, and pairs that are rotated together lie side by
side. Rows of the matrices are put into our order when they are packed; products of queries and keys stay the same.
"""

import torch
from quire_kernels import HeadLinearWeight, head_linear, pack_head_linear, paged_attention, rms_norm, rope_and_cache
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import ColumnParallel, RowParallel, Weight
from quire_engine.models.layers.rope import RopeTables, rope_order
from quire_engine.models.linear import LoadedLinear
from quire_engine.models.options import LatentAttentionOptions
from quire_engine.models.step_context import StepContext

ALONE = ParallelState()
NORM_EPS = 1e-6
"""The epsilon of the two norms here, not `rms_norm_eps`: so the models were trained."""


class _HeadProjections(ColumnParallel):
    """`kv_b_proj`: the matrices W_K and W_V of each head of this rank. They are small and stay in the model's dtype."""

    takes_adapters = False

    def __init__(self, num_heads: int, options: LatentAttentionOptions, parallel: ParallelState) -> None:
        self.options, size = options, options.nope_size + options.value_size
        super().__init__(options.kv_rank, {"kv_b_proj": num_heads * size}, False, parallel, unit=size)
        self.num_heads = self.sizes[0] // size

    def packed_bytes(self, like: torch.Tensor) -> int:
        one, rope, rank = self.options, self.options.rope_size, self.options.kv_rank
        num_weights = (rope + rank) * (rope + one.nope_size) + one.value_size * rank
        return self.num_heads * num_weights * self._dtype.itemsize

    def packed_of(self, loaded: LoadedLinear) -> tuple[HeadLinearWeight, HeadLinearWeight]:
        """The weights of keys, [H, R + C, R + N], which copy the R features before the others and multiply these by
        W_Kᵀ; and those of values, [H, V, C]."""
        nope, rope, rank = self.options.nope_size, self.options.rope_size, self.options.kv_rank
        weight_HFC = self.method.dense(loaded).view(self.num_heads, -1, rank)
        keys_HDF = weight_HFC.new_zeros(self.num_heads, rope + rank, rope + nope)
        keys_HDF[:, :rope, :rope].diagonal(dim1=1, dim2=2).fill_(1.0)
        keys_HDF[:, rope:, rope:] = weight_HFC[:, :nope].transpose(1, 2)
        return pack_head_linear(keys_HDF), pack_head_linear(weight_HFC[:, nope:])


class LatentAttention(nn.Module):
    """The attention of a layer. Each rank has some of the heads; the rows of the cache are on every rank."""

    def __init__(
        self, config: CheckpointConfig, latent: LatentAttentionOptions, parallel: ParallelState, tables: RopeTables
    ) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.latent, self.cos_sin = latent, tables(latent.rope, latent.rope_size)[0]
        row_size, head_size = latent.kv_rank + latent.rope_size, latent.nope_size + latent.rope_size
        rope = rope_order(latent.rope_size, latent.interleaved)
        row = torch.cat((latent.kv_rank + rope, torch.arange(latent.kv_rank, device="cpu")))
        self.q_a_layernorm = None
        parts = {"kv_a_proj_with_mqa": row_size}
        name, in_features, query_bias = "q_proj", hidden_size, False
        if latent.query_rank is not None:
            self.q_a_layernorm = Weight(latent.query_rank)
            parts = {"q_a_proj": latent.query_rank, **parts}
            row = torch.cat((torch.arange(latent.query_rank, device="cpu"), latent.query_rank + row))
            name, in_features = "q_b_proj", latent.query_rank
        self.down_proj = ColumnParallel(hidden_size, parts, latent.bias, ALONE)
        self.down_proj.order = row
        self.kv_a_layernorm = Weight(latent.kv_rank)
        self.query_proj = ColumnParallel(
            in_features, {name: config.num_heads * head_size}, query_bias, parallel, unit=head_size
        )
        self.num_heads = self.query_proj.sizes[0] // head_size
        head = torch.cat((latent.nope_size + rope, torch.arange(latent.nope_size, device="cpu")))
        self.query_proj.order = (torch.arange(self.num_heads, device="cpu")[:, None] * head_size + head).flatten()
        self.head_projections = _HeadProjections(config.num_heads, latent, parallel)
        size = config.num_heads * latent.value_size
        self.o_proj = RowParallel(size, "o_proj", hidden_size, latent.bias, parallel)
        self.spec = AttentionSpec(self.num_heads, 1, row_size, value_size=latent.kv_rank)

    def forward(self, hidden_TE: torch.Tensor, cache_NKBD: torch.Tensor, context: StepContext) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's rows to the cache first."""
        *queries, row_TD = self.down_proj(hidden_TE).split(self.down_proj.sizes, dim=-1)
        if self.q_a_layernorm is not None:
            hidden_TE = rms_norm(queries[0], self.q_a_layernorm.weight, NORM_EPS)
        latent_TC = row_TD[:, self.latent.rope_size :]
        rms_norm(latent_TC, self.kv_a_layernorm.weight, NORM_EPS, out=latent_TC)
        of_keys, of_values = self.head_projections.packed_weight
        query_THF = self.query_proj(hidden_TE).view(len(hidden_TE), self.num_heads, -1)
        query_THD = rope_and_cache(
            head_linear(query_THF, of_keys), row_TD.unsqueeze(1), None, context.positions,
            self.cos_sin, context.slot_mapping, cache_NKBD, None,
        )  # fmt: skip
        sums_THC = paged_attention(
            query_THD, cache_NKBD, None, context.block_table, context.query_start_loc, context.seq_lens,
            self.latent.scale, context.plans.get(self.spec), value_size=self.spec.value_size,
        )  # fmt: skip
        out_TE: torch.Tensor = self.o_proj(head_linear(sums_THC, of_values).flatten(1))
        return out_TE
