"""Rows of a matrix written to slots of a paged table, as keys and values are to their caches, and read from there."""

import torch

from quire_kernels.cpu import (
    check_tensor,
    check_written_rows,
    launch,
    library_for,
    structure,
    uses_triton,
    with_dense_rows,
)

_StoreCall = structure("StoreCall")
_StoreColumnsCall = structure("StoreColumnsCall")
_LoadCall = structure("LoadCall")


def store_rows(rows_TE: torch.Tensor, slot_mapping_T: torch.Tensor, out_NE: torch.Tensor) -> None:
    """Write row t of a matrix to row `slot_mapping_T[t]` of a table. Raises TypeError or ValueError if a tensor does
    not fit the others.

    Args:
        rows_TE: any strides.
        slot_mapping_T: int64, each at least 0 and below the table's rows: not checked by the kernels. If
            tokens share a slot, any of them may remain.
        out_NE: of the same dtype, written in place; its rows may be a part of longer ones.
    """
    rows_TE = with_dense_rows(rows_TE)
    rows, size = rows_TE.shape
    check_written_rows("out_NE", out_NE, rows_TE)
    if uses_triton(rows_TE):
        from quire_kernels.gpu import rows as gpu

        return gpu.store_rows(rows_TE, slot_mapping_T, out_NE)
    slot_mapping_T = slot_mapping_T.contiguous()
    check_tensor("slot_mapping_T", slot_mapping_T, torch.int64, rows)
    if library_for(rows_TE) is None:
        out_NE[slot_mapping_T] = rows_TE
        return None
    call = _StoreCall(
        rows_TE.data_ptr(), rows_TE.stride(0), slot_mapping_T.data_ptr(), out_NE.data_ptr(), out_NE.stride(0), rows,
        size, rows_TE.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_store_rows", call)
    return None


def load_rows(table_NE: torch.Tensor, row_ids_T: torch.Tensor) -> torch.Tensor:
    """Rows of a table, one after the other: [T, E]. Raises TypeError or ValueError if a tensor does not fit.

    Args:
        table_NE: its rows may be a part of longer ones.
        row_ids_T: int64, each at least 0 and below N: not checked by the kernel.
    """
    if row_ids_T.dtype != torch.int64 or row_ids_T.device != table_NE.device:
        raise TypeError(f"row_ids_T is {row_ids_T.dtype} on {row_ids_T.device}; it must be int64 on {table_NE.device}")
    table_NE = with_dense_rows(table_NE)
    if row_ids_T.dim() != 1:
        raise ValueError(f"row_ids_T has shape {list(row_ids_T.shape)}; it must be one-dimensional")
    if library_for(table_NE) is None:
        return table_NE[row_ids_T]
    row_ids_T = row_ids_T.contiguous()
    rows, size = len(row_ids_T), table_NE.shape[1]
    out_TE = table_NE.new_empty(rows, size)
    call = _LoadCall(
        table_NE.data_ptr(), table_NE.stride(0), row_ids_T.data_ptr(), out_TE.data_ptr(), rows, size,
        table_NE.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_load_rows", call)
    return out_TE


def store_columns(rows_SD: torch.Tensor, columns_D: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
    """Write column i of a matrix to column `columns_D[i]` of another, which is returned; its other columns stay. Raises
    TypeError or ValueError if a tensor does not fit the others.

    Args:
        rows_SD: any strides.
        columns_D: int64, each at least 0, below V and there once: not checked by the C++ kernel.
        out_SV: of the same dtype, written in place; None: a new matrix, whose columns are all written.
    """
    if out_SV is None:
        out_SV = rows_SD.new_empty(rows_SD.shape)
    if len(out_SV) != len(rows_SD):
        raise ValueError(f"out_SV has {len(out_SV)} rows; it must have {len(rows_SD)}, as rows_SD has")
    if library_for(rows_SD, out_SV) is None or out_SV.stride(1) != 1:
        return out_SV.index_copy_(1, columns_D, rows_SD)
    rows_SD = with_dense_rows(rows_SD)
    rows, size = rows_SD.shape
    check_tensor("columns_D", columns_D, torch.int64, size)
    call = _StoreColumnsCall(
        rows_SD.data_ptr(), rows_SD.stride(0), columns_D.data_ptr(), out_SV.data_ptr(), out_SV.stride(0), rows, size,
        rows_SD.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_store_columns", call)
    return out_SV
