"""Blocks of a paged KV cache that is kept in tiles, as rows in the order of their shape, and back; see
`kernels/csrc/pages.inc`. Others are not converted here: `kv_cache.natural_key_order` and its like do that in torch."""

import ctypes
import itertools
import weakref
from collections.abc import Sequence

import torch

from quire_kernels import kv_cache
from quire_kernels.cpu import launch, library, structure

KVCaches = Sequence[tuple[torch.Tensor, ...]]

_PagesCall = structure("PagesCall")


class PageConverter:
    """Copies blocks of some caches to rows, and back. Keeps none of them alive.

    Args:
        kv_caches: keys of each layer, and values if it keeps any, all in tiles.
    """

    def __init__(self, kv_caches: KVCaches) -> None:
        handle = library()
        assert handle is not None
        self._kernel = handle.quire_convert_pages
        first = kv_caches[0][0]
        self._first = weakref.ref(first)
        self._num_blocks = min(len(layer[0]) for layer in kv_caches)
        self.block_bytes = sum(one[0].nbytes for layer in kv_caches for one in layer)
        addresses = ([*(one.data_ptr() for one in layer), 0][:2] for layer in kv_caches)
        caches = (ctypes.c_uint64 * (2 * len(kv_caches)))(*itertools.chain(*addresses))
        shapes = (ctypes.c_int64 * (2 * len(kv_caches)))(*(n for layer in kv_caches for n in layer[0].shape[1:4:2]))
        self._call = _PagesCall(
            caches=ctypes.addressof(caches), shapes=ctypes.addressof(shapes), layers=len(kv_caches),
            block_size=first.shape[2], number_bytes=first.itemsize,
        )  # fmt: skip
        self._arrays = caches, shapes

    @classmethod
    def of(cls, kv_caches: KVCaches) -> "PageConverter | None":
        """None unless all are in tiles, of one dtype and block size, and keys and values of a layer of one shape."""
        first = kv_caches[0][0]
        is_possible = all(
            kv_cache.is_tiled(one)
            and one.shape == layer[0].shape
            and (one.dtype, one.shape[2]) == (first.dtype, first.shape[2])
            and one.is_contiguous()
            for layer in kv_caches
            for one in layer
        )
        return cls(kv_caches) if is_possible else None

    def is_for(self, kv_caches: KVCaches) -> bool:
        """Whether these are the caches: they may have been freed since, and others allocated."""
        return bool(kv_caches) and self._first() is kv_caches[0][0]

    def convert(self, block_ids: Sequence[int], rows: torch.Tensor, to_cache: bool) -> None:
        """Copy blocks to rows, or rows to blocks, while the caches are there. For one thread at a time.

        Args:
            block_ids: which.
            rows: [n, bytes of a block] uint8 on the CPU.
            to_cache: the direction.

        Raises:
            ValueError: the rows are not as they have to be, or there is no such block.
        """
        is_right = rows.dtype is torch.uint8 and rows.is_cpu and rows.shape == (len(block_ids), self.block_bytes)
        if not is_right or rows.stride(1) != 1:
            raise ValueError(f"rows are {rows.dtype} of {list(rows.shape)}; they must be uint8 of "
                             f"{[len(block_ids), self.block_bytes]}, without gaps in a row")  # fmt: skip
        if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ValueError(f"blocks {list(block_ids)} are asked for; there are {self._num_blocks}")
        ids, call = (ctypes.c_int64 * len(block_ids))(*block_ids), self._call
        call.block_ids, call.blocks = ctypes.addressof(ids), len(block_ids)
        call.rows, call.row_stride, call.to_cache = rows.data_ptr(), rows.stride(0), to_cache
        launch(self._kernel, call)
