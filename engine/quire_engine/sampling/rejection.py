"""Rejection sampling of drafts: tokens distributed as the target's, for drafts of any distribution.

Leviathan et al. 2023 (https://arxiv.org/abs/2211.17192, section 2.3), Chen et al. 2023
(https://arxiv.org/abs/2302.01318, modified rejection sampling):

- p: the distribution of a row's token by the target model, q: by the draft model; d: the draft, a draw from q.
- The draft is accepted with probability a = min(1, p(d) / q(d)).
- If it is not, the *recovery* token is a draw from the *residual*, max(p - q, 0) normalised. It is never d, as p(d) <
  q(d). So a draft is accepted if and only if it is the row's token.

The two steps are one draw from one distribution, and are computed as such::

    token id                 0     1     2 = d   3
    p                       0.5   0.2    0.3     0
    q                       0.1   0.3    0.6     0      a = 0.3 / 0.6
    residual                 1     0      0      0
    the row's token by      0.5    0     0.5     0      a on d, and (1 - a) · residual

The result is a draw from p only if the noise of that draw is independent of the noise that d was drawn with, or the
recovery would favour what the draft model favoured. Noise is a function of (seed, position, token id), see
`quire_kernels.sampling`, and a position is 32 bits of Philox's counter. A sequence needs 30 of them; the other two say
what the noise is for::

    bits 31, 30     noise for
    00              tokens of rows without a draft: `quire_kernels.sample` at the token's position
    01              drafts: `quire_kernels.sample` at `draft_positions`
    10              tokens of rows with a draft: `verify_drafts`

So no two of them ever have a counter in common, and Philox's outputs for different counters of a key are independent.

Noise depends on nothing else, so a position has the same noise again if a step drops its token or its draft and a later
one comes back to it. That is sound as long as nothing looked at what was dropped. For one, whether a position is
computed with its draft must not depend on which token the draft is (it may depend on q, and on the drafts before):
leaving out a draft because q(d) is small makes the drafts that are kept another distribution than q.
"""

import torch
from quire_kernels import probabilities, sample

_DRAFT = 1 << 30
_VERIFICATION = 2 << 30


def draft_positions(positions: torch.Tensor) -> torch.Tensor:
    """[R] int64, the positions to pass to `quire_kernels.sample` for drawing drafts, with the request's own seed, of
    the positions that the drafts take in their sequences, below 2**30."""
    return positions + _DRAFT


def verify_drafts(
    logits_RV: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    draft_probabilities_RV: torch.Tensor,
) -> torch.Tensor:
    """The token of each row that has a draft: the draft if it is accepted, else the recovery token.

    A greedy row has the most likely token, whatever its draft. On a GPU the host does not wait for any of this.

    Args:
        logits_RV: float32, the target's, penalties and masks applied.
        temperature, min_p, top_k, top_p, seeds: [R], of the target; see `quire_kernels.sample`.
        positions: [R] int64 below 2**30, the position of the row's token in its sequence.
        drafts: [R] int64, drawn at `draft_positions`.
        draft_probabilities_RV: float32, what each draft was drawn from: q, after temperature and masks. One that is
            not drawn but certain has probability 1.

    Returns:
        [R] int64.
    """
    target_RV = probabilities(logits_RV, temperature, min_p, top_k, top_p)
    mixture_RV = _token_distribution(target_RV, draft_probabilities_RV, drafts)
    all_of_them = (
        torch.ones_like(temperature),
        torch.zeros_like(min_p),
        torch.full_like(top_k, mixture_RV.shape[1]),
        torch.ones_like(top_p),
    )
    # A token of probability 0 has the logit -87 here. The likeliest has -log V at least, and no noise makes up for the
    # rest: it differs by less than 20. The logarithm of 0 would take the CPU forty times as long.
    logits_RV = mixture_RV.clamp_(min=torch.finfo(torch.float32).tiny).log_()
    return sample(logits_RV, *all_of_them, seeds, positions + _VERIFICATION)


def _token_distribution(target_RV: torch.Tensor, draft_RV: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """[R, V] float32: of each row's token, given its draft. Each row has a positive and finite sum."""
    drafts_R1 = drafts[:, None]
    of_draft_R1 = draft_RV.gather(1, drafts_R1).clamp(min=torch.finfo(torch.float32).tiny)
    accepted_R1 = (target_RV.gather(1, drafts_R1) / of_draft_R1).clamp(max=1.0)
    residual_RV = (target_RV - draft_RV).clamp_(min=0.0)
    total_R1 = residual_RV.sum(-1, keepdim=True)
    # p and q can be equal but for the last bit of p(d). Then the target takes the residual's place.
    residual_RV = torch.where(total_R1 > 0, residual_RV.div_(total_R1), target_RV)
    return residual_RV.mul_(1.0 - accepted_R1).scatter_add_(1, drafts_R1, accepted_R1)
