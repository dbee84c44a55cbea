"""Copies of whole blocks of a paged KV cache, in the Triton language."""

import torch
import triton
import triton.language as tl

__all__ = ["copy_blocks"]

BLOCK = 4096
"""Elements of a program."""


@triton.jit
def _copy_blocks_kernel(cache, source_ids, target_ids, BLOCK_ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (copy, part of the block)."""
    copy, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(source_ids + copy) * BLOCK_ELEMENTS, tl.load(target_ids + copy) * BLOCK_ELEMENTS
    values = tl.load(cache + source + i, mask=i < BLOCK_ELEMENTS)
    tl.store(cache + target + i, values, mask=i < BLOCK_ELEMENTS)


def copy_blocks(cache_NKBD: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """As of `kv_cache.copy_blocks`. Blocks are dense, in whichever order their elements lie."""
    block_elements = cache_NKBD[0].numel()
    assert cache_NKBD.stride(0) == block_elements, "blocks that lie one behind the other"
    if len(source_ids):
        _copy_blocks_kernel[(len(source_ids), triton.cdiv(block_elements, BLOCK))](
            cache_NKBD, source_ids, target_ids, block_elements, BLOCK
        )
