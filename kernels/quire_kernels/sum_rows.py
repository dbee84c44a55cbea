"""Sums of the rows of each sequence, of which mean pooling makes embeddings."""

from itertools import pairwise

import torch

from quire_kernels.cpu import check_tensor, launch, library_for, structure, with_dense_rows

GRID = float(1 << 26)
"""Numbers are rounded to multiples of its inverse before they are summed."""

_SumRowsCall = structure("SumRowsCall")


def sum_rows(hidden_TE: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
    """The sum of each sequence's rows, [S, E] float64, of numbers that are rounded to multiples of 2^-26.

    Below 2^27 it is exact, and so does not depend on how a prompt is cut into chunks whose sums are added up. Raises
    TypeError or ValueError if the tensors do not fit each other.

    Args:
        hidden_TE: any strides.
        query_start_loc: [S + 1] int64 on the CPU, cumulative numbers of rows.
    """
    num_seqs, num_rows = query_start_loc.numel() - 1, len(hidden_TE)
    check_tensor("query_start_loc", query_start_loc, torch.int64, num_seqs + 1)
    starts = query_start_loc.tolist()
    if starts != sorted(starts) or starts[0] < 0 or starts[-1] > num_rows:
        raise ValueError(f"query_start_loc is {starts}; it must be rising, from 0 to at most the {num_rows} rows")
    if library_for(hidden_TE) is None:
        sums = [(hidden_TE[start:end].double() * GRID).round_().sum(0) for start, end in pairwise(starts)]
        return torch.stack(sums) / GRID
    hidden_TE = with_dense_rows(hidden_TE)
    sums_SE = torch.empty(num_seqs, hidden_TE.shape[1], dtype=torch.float64)
    call = _SumRowsCall(
        hidden_TE.data_ptr(), hidden_TE.stride(0), query_start_loc.data_ptr(), sums_SE.data_ptr(), num_seqs,
        hidden_TE.shape[1], hidden_TE.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_sum_rows", call)
    return sums_SE
