"""PagedAttention (Kwon et al. 2023, https://arxiv.org/abs/2309.06180) over a ragged batch.

One call serves prefill chunks, decodes and anything between: sequence s owns the query rows
`query_start_loc[s] : query_start_loc[s+1]`, which are the last of its `seq_lens[s]` tokens.

::

    sequence s:   | context, in the cache already | query rows of this step |
                  |◄──────────────────── seq_lens[s] ─────────────────────►|
                                                  |◄── query_len ──────────►|
    row r of the step sees keys 0 … seq_lens[s] - query_len + r
"""

import torch
import torch.nn.functional as F

__all__ = ["paged_attention"]


def paged_attention(
    query_THD: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor,
    block_table_SM: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each query row to its own sequence's keys and values.

    Args:
        query_THD: queries. H is a multiple of K; query head h uses key head h // (H / K).
        key_cache_NKBD: keys, those of this step already written.
        value_cache_NKBD: values, likewise.
        block_table_SM: int64 block ids; entries past a sequence's blocks are ignored but must be valid ids.
        query_start_loc: [S + 1] int64, cumulative query lengths.
        seq_lens: [S] int64, context plus query tokens.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        [T, H, D], in the queries' dtype.
    """
    out_THD = torch.empty_like(query_THD)
    query_lens = query_start_loc.diff()
    decodes = (query_lens == 1).nonzero().squeeze(1)
    if len(decodes):
        rows = query_start_loc[decodes]
        out_THD[rows] = _attend_single(
            query_THD[rows], key_cache_NKBD, value_cache_NKBD, block_table_SM[decodes], seq_lens[decodes], scale
        )
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for s in (query_lens > 1).nonzero().squeeze(1).tolist():
        rows_s = slice(starts[s], starts[s + 1])
        out_THD[rows_s] = _attend_many(
            query_THD[rows_s], key_cache_NKBD, value_cache_NKBD, block_table_SM[s], lens[s], scale
        )
    return out_THD


def _attend_single(
    query_SHD: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor,
    block_table_SM: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query row per sequence, all sequences at once, padded to the longest."""
    num_seqs, num_heads, head_size = query_SHD.shape
    num_kv_heads, block_size = key_cache_NKBD.shape[1:3]
    max_len = int(seq_lens.max())
    table = block_table_SM[:, : -(-max_len // block_size)]
    # [S, M, K, B, D] -> [S, K, M * B, D]: the tokens of a sequence in order.
    key, value = (
        cache[table].transpose(1, 2).reshape(num_seqs, num_kv_heads, -1, head_size).to(query_SHD.dtype)
        for cache in (key_cache_NKBD, value_cache_NKBD)
    )
    query = query_SHD.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_size)
    scores = (query @ key.transpose(-1, -2)).float().mul_(scale)
    outside = torch.arange(key.shape[2], device=key.device) >= seq_lens[:, None]
    scores.masked_fill_(outside[:, None, None], float("-inf"))
    weights = scores.softmax(-1).to(value.dtype)
    # A weight of 0 is not enough to leave a value out: padding may be another sequence's NaN or infinity.
    value.masked_fill_(outside[:, None, :, None], 0.0)
    return (weights @ value).reshape(num_seqs, num_heads, head_size)


def _attend_many(
    query_QHD: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor,
    block_table_M: torch.Tensor,
    seq_len: int,
    scale: float,
) -> torch.Tensor:
    """Several query rows (Q) of one sequence."""
    query_len, _, head_size = query_QHD.shape
    num_kv_heads, block_size = key_cache_NKBD.shape[1:3]
    table = block_table_M[: -(-seq_len // block_size)]
    # [M, K, B, D] -> [1, K, seq_len, D]
    key, value = (
        cache[table].transpose(0, 1).reshape(1, num_kv_heads, -1, head_size)[:, :, :seq_len].to(query_QHD.dtype)
        for cache in (key_cache_NKBD, value_cache_NKBD)
    )
    last_key = torch.arange(query_len, device=key.device) + (seq_len - query_len)
    visible = torch.arange(seq_len, device=key.device) <= last_key[:, None]
    out_HQD = F.scaled_dot_product_attention(
        query_QHD.transpose(0, 1).unsqueeze(0), key, value, attn_mask=visible, scale=scale, enable_gqa=True
    )
    return out_HQD[0].transpose(0, 1)
