"""The router of a mixture of experts: scores of the experts in float32, and the k best of each token.

`topk_softmax`: as Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.1) and Qwen's mixtures do;
divided by the sum of the chosen ones, it is the softmax of these alone.

`grouped_topk`: DeepSeek's, who first choose the best groups of experts (https://arxiv.org/abs/2405.04434, section
2.2.2), and balance their load by a bias that decides the choice and no weight (https://arxiv.org/abs/2412.19437,
section 2.1.2).
"""

import torch

from quire_kernels.cpu import launch, library, pointer, structure, uses_triton, with_dense_rows

_RouteCall = structure("RouteCall")
_GroupedRouteCall = structure("GroupedRouteCall")


def topk_softmax(
    logits_TX: torch.Tensor,
    top_k: int,
    renormalize: bool,
    counts_X: torch.Tensor | None = None,
    scale_X: torch.Tensor | None = None,
    jitter: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts and their weights, likeliest first; of equal logits the lower id first. Raises TypeError or
    ValueError if a tensor has another dtype or shape, or `top_k` is more than there are experts.

    Args:
        logits_TX: float32, one per expert.
        top_k: experts per token.
        renormalize: the weights of a token add up to 1.
        counts_X: int64, on the logits' device; each expert's is raised by the number of tokens that chose it.
        scale_X: float32, multiplies the weights of each expert; None: nothing does.
        jitter: above 0, weights are SparseMixer's (Liu et al. 2024, https://arxiv.org/abs/2409.12136): each choice's is
            its part of a softmax of its own, over the experts that were not chosen before and whose logits are no
            further below than `2 * jitter` times the larger of it and their magnitude. Not renormalised.

    Returns:
        [T, top_k] float32, the weights, and [T, top_k] int64, the experts' ids.
    """
    logits_TX = _checked_logits(logits_TX)
    rows, experts = logits_TX.shape
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to the number of experts, {experts}")
    _check_of_experts("counts_X", counts_X, torch.int64, logits_TX)
    _check_of_experts("scale_X", scale_X, torch.float32, logits_TX)
    if library() is None or uses_triton(logits_TX) or not logits_TX.is_cpu:
        weights, expert_ids = _topk_softmax_torch(logits_TX, top_k, renormalize, jitter)
        return _counted((weights if scale_X is None else weights * scale_X[expert_ids], expert_ids), counts_X)
    weights = torch.empty(rows, top_k, dtype=torch.float32)
    expert_ids = torch.empty(rows, top_k, dtype=torch.int64)
    call = _RouteCall(
        logits_TX.data_ptr(), logits_TX.stride(0), pointer(scale_X), weights.data_ptr(), expert_ids.data_ptr(),
        pointer(counts_X), rows, experts, top_k, renormalize, jitter,
    )  # fmt: skip
    launch("quire_route_tokens", call)
    return weights, expert_ids


def grouped_topk(
    logits_TX: torch.Tensor,
    top_k: int,
    renormalize: bool,
    *,
    num_groups: int,
    top_groups: int,
    scoring: str,
    bias_X: torch.Tensor | None = None,
    scale: float = 1.0,
    counts_X: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts and their weights, best first, all from its best groups; of equals the lower id first.
    Raises TypeError or ValueError like `topk_softmax`, and if a number is out of range.

    Args:
        logits_TX: see `topk_softmax`, like the next two and the counts.
        top_k: no more than there are experts in `top_groups` groups.
        renormalize: the weights before they are scaled.
        num_groups: of X / num_groups consecutive experts each.
        top_groups: groups per token.
        scoring: `softmax`, where a group is as good as its best expert; or `sigmoid`, where it is as good as its best
            two together.
        bias_X: float32, added to scores for the choice alone.
        scale: of the weights.
        counts_X: likewise.
    """
    logits_TX = _checked_logits(logits_TX)
    rows, experts = logits_TX.shape
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring is {scoring!r}; it must be softmax or sigmoid")
    if num_groups < 1 or experts % num_groups or not 0 < top_groups <= num_groups:
        raise ValueError(
            f"num_groups is {num_groups} and top_groups {top_groups}; num_groups must be a divisor of the {experts} "
            "experts, and top_groups from 1 to num_groups"
        )
    most = experts // num_groups * top_groups
    if not 0 < top_k <= most:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to {most}, the experts of top_groups={top_groups}")
    _check_of_experts("bias_X", bias_X, torch.float32, logits_TX)
    _check_of_experts("counts_X", counts_X, torch.int64, logits_TX)
    if library() is None or uses_triton(logits_TX) or not logits_TX.is_cpu:
        keys_TX = scores_TX = logits_TX.softmax(1) if scoring == "softmax" else logits_TX.sigmoid()
        if bias_X is not None:
            keys_TX = scores_TX + bias_X
        chosen = _grouped_topk_torch(scores_TX, keys_TX, top_k, renormalize, num_groups, top_groups, scoring, scale)
        return _counted(chosen, counts_X)
    weights = torch.empty(rows, top_k, dtype=torch.float32)
    expert_ids = torch.empty(rows, top_k, dtype=torch.int64)
    call = _GroupedRouteCall(
        logits_TX.data_ptr(), logits_TX.stride(0), pointer(bias_X), weights.data_ptr(), expert_ids.data_ptr(),
        pointer(counts_X), rows, experts, top_k, num_groups, top_groups, scale, scoring == "sigmoid", renormalize,
    )  # fmt: skip
    launch("quire_route_tokens_in_groups", call)
    return weights, expert_ids


def _checked_logits(logits_TX: torch.Tensor) -> torch.Tensor:
    if logits_TX.dtype != torch.float32:
        raise TypeError(f"logits_TX is {logits_TX.dtype}; it must be float32")
    return with_dense_rows(logits_TX)


def _check_of_experts(name: str, numbers_X: torch.Tensor | None, dtype: torch.dtype, logits_TX: torch.Tensor) -> None:
    if numbers_X is None:
        return
    if numbers_X.dtype != dtype or numbers_X.device != logits_TX.device:
        raise TypeError(f"{name} is {numbers_X.dtype} on {numbers_X.device}; it must be {dtype} on {logits_TX.device}")
    if numbers_X.shape != logits_TX.shape[1:] or not numbers_X.is_contiguous():
        raise ValueError(f"{name} is {list(numbers_X.shape)}; it must be {list(logits_TX.shape[1:])}, without gaps")


def _counted(
    chosen: tuple[torch.Tensor, torch.Tensor], counts_X: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if counts_X is not None:
        ids = chosen[1].flatten()
        counts_X.index_add_(0, ids, torch.ones_like(ids))
    return chosen


def _grouped_topk_torch(
    scores_TX: torch.Tensor,
    keys_TX: torch.Tensor,
    top_k: int,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scoring: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys_TGX = keys_TX.view(len(keys_TX), num_groups, -1)
    best_of_group = keys_TGX.topk(min(2 if scoring == "sigmoid" else 1, keys_TGX.shape[2]), dim=2).values.sum(2)
    groups = torch.argsort(best_of_group, dim=1, descending=True, stable=True)[:, :top_groups]
    is_kept_TG = torch.zeros_like(best_of_group, dtype=torch.bool).scatter(1, groups, True)
    kept_TX = keys_TGX.masked_fill(~is_kept_TG[:, :, None], float("-inf")).flatten(1)
    expert_ids = torch.argsort(kept_TX, dim=1, descending=True, stable=True)[:, :top_k]
    weights = scores_TX.gather(1, expert_ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * scale, expert_ids.contiguous()


def _topk_softmax_torch(
    logits_TX: torch.Tensor, top_k: int, renormalize: bool, jitter: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """On a GPU too: the numbers are few, and no operation waits for it."""
    expert_ids = torch.argsort(logits_TX, dim=1, descending=True, stable=True)[:, :top_k]  # `topk` orders ties anyhow
    if jitter > 0:
        left_TX, mixed = logits_TX, []
        for chosen_T1 in torch.split(expert_ids, 1, dim=1):
            greatest_T1 = logits_TX.gather(1, chosen_T1)
            is_far_TX = greatest_T1 - logits_TX > 2 * jitter * logits_TX.abs().maximum(greatest_T1)
            mixed.append(left_TX.masked_fill(is_far_TX, float("-inf")).softmax(1).gather(1, chosen_T1))
            left_TX = left_TX.scatter(1, chosen_T1, float("-inf"))
        return torch.cat(mixed, dim=1), expert_ids.contiguous()
    weights = logits_TX.softmax(1).gather(1, expert_ids)
    return weights / weights.sum(1, keepdim=True) if renormalize else weights, expert_ids.contiguous()
