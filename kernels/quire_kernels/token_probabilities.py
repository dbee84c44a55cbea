"""How likely given tokens are."""

import torch

from quire_kernels.cpu import check_tensor, launch, library_for, structure, with_dense_rows

_TokenProbabilitiesCall = structure("TokenProbabilitiesCall")


def token_probabilities(logits_SV: torch.Tensor, token_ids_S: torch.Tensor) -> torch.Tensor:
    """The softmax of each row, at one token of it.

    Args:
        logits_SV: float32; minus infinity is allowed, but not for all of a row.
        token_ids_S: int64, each at least 0 and below V: not checked by the C++ kernel.

    Returns:
        [S] float32.
    """
    handle = library_for(logits_SV) if logits_SV.dtype == torch.float32 else None
    if handle is None:
        return (logits_SV.gather(1, token_ids_S[:, None])[:, 0] - logits_SV.logsumexp(-1)).exp_()
    logits_SV = with_dense_rows(logits_SV)
    rows, vocab_size = logits_SV.shape
    check_tensor("token_ids_S", token_ids_S, torch.int64, rows)
    out = torch.empty(rows, dtype=torch.float32)
    call = _TokenProbabilitiesCall(
        logits_SV.data_ptr(), logits_SV.stride(0), token_ids_S.data_ptr(), out.data_ptr(), rows, vocab_size
    )
    launch(handle.quire_token_probabilities, call, out)
    return out
