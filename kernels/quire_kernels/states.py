"""StateRows: how the sequences of a step go on from states that a cache keeps instead of keys and values.

A recurrent layer computes token after token, each from the state that the one before it left. Of a sequence the cache
has one state, after its last token that cannot be taken back, and the inputs of the tokens after it in a *ring*::

    positions      …  6   7   8   9 │ 10  11                   tokens 8 and 9 were drafts, and are accepted: they are
    in the cache      state after 7 │                          computed again from their inputs, to the same bits
                      inputs of 8, 9│
    this step                       │ 10  11
                       num_replayed = 2      state after 11 ─► `target`, inputs ─► the ring of `target`

So a rejected draft needs no copy of a state, which is a hundred times as large as its inputs. Position `p` is in row
`p % R` of a ring of R rows. A block of the cache is a state and a ring; a block with the state after the last token of
a prefix can be shared by all sequences that begin with it.

Tokens of a sequence are computed one by one, in float32, in every kernel: a sequence has the same bits however it is
divided among steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire_kernels.cpu import Call, check_tensor, structure

_StateStep = structure("StateStep")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """T rows of S sequences, at least one of each. int64, contiguous, on the device of the rows."""

    positions: torch.Tensor
    """[T]"""
    query_start_loc: torch.Tensor
    """[S + 1], cumulative number of rows; entries behind the one that is T are not read."""
    sources: torch.Tensor
    """[S], the block with the state that a sequence goes on from; -1: it begins, with zeros."""
    num_replayed: torch.Tensor
    """[S], how many tokens between that state and the first row are computed again from the ring."""
    targets: torch.Tensor
    """[S], the block whose ring gets the inputs of the last rows. It is among the sequence's stores."""
    store_start_loc: torch.Tensor
    """[S + 1], cumulative number of stores, at least one of each sequence."""
    store_lens: torch.Tensor
    """[W], after how many tokens, of those replayed and the rows, a state is stored; ascending in each sequence."""
    store_blocks: torch.Tensor
    """[W], in which block. No block is written by one sequence of a step and read or written by another."""

    def sequences(self) -> "Iterator[_Sequence]":
        """Each sequence, on the host; for implementations in torch."""
        starts, num_rows = self.query_start_loc.tolist(), len(self.positions)
        for number in range(len(self.sources)):
            start, end = starts[number], starts[number + 1]
            stores = range(int(self.store_start_loc[number]), int(self.store_start_loc[number + 1]))
            yield _Sequence(
                start, end, int(self.positions[start]), int(self.sources[number]), int(self.num_replayed[number]),
                int(self.targets[number]), [(int(self.store_lens[i]), int(self.store_blocks[i])) for i in stores],
            )  # fmt: skip
            if end == num_rows:
                return


@dataclass(frozen=True, slots=True)
class _Sequence:
    start: int
    end: int
    first: int
    """The position of its first row."""
    source: int
    num_replayed: int
    target: int
    stores: list[tuple[int, int]]


def step_of(rows: StateRows, num_rows: int) -> Call:
    """`StateStep` of kernels/csrc/calls.h. Raises TypeError or ValueError if a tensor does not fit the others."""
    num_seqs, num_stores = len(rows.sources), len(rows.store_lens)
    lengths = {
        "positions": num_rows, "query_start_loc": num_seqs + 1, "sources": num_seqs, "num_replayed": num_seqs,
        "targets": num_seqs, "store_start_loc": num_seqs + 1, "store_lens": num_stores, "store_blocks": num_stores,
    }  # fmt: skip
    for name, length in lengths.items():
        check_tensor(name, getattr(rows, name), torch.int64, length)
    return _StateStep(*(getattr(rows, name).data_ptr() for name in lengths), num_seqs)


def block_stride(name: str, cache: torch.Tensor, *shape: int) -> int:
    """The stride of the blocks of a cache. Raises TypeError unless it is float32, and ValueError if a block has another
    shape, or gaps."""
    check_tensor(f"a block of {name}", cache[0], torch.float32, *shape)
    return cache.stride(0)
