"""Prompt lookup drafts what followed the longest n-gram, at its most recent place."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.sampling_params import SamplingParams
from quire_engine.spec_decode import match_index
from quire_engine.spec_decode.lookup import NgramProposer
from support.scheduling import make_request


def reference(token_ids: list[int], shortest: int, longest: int, max_tokens: int) -> list[int]:
    """By trying all n-grams at all places."""
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                text = list(token_ids)
                for i in range(max_tokens):
                    text.append(text[end + i])
                return text[len(token_ids) :]
    return []


@given(
    st.integers(1, 4).flatmap(lambda vocab_size: st.lists(st.integers(0, vocab_size), min_size=1, max_size=60)),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(1, 12),
    st.lists(st.integers(1, 60)),
)
def test_drafts_are_those_of_the_reference(
    token_ids: list[int], shortest: int, more: int, max_tokens: int, calls: list[int]
) -> None:
    proposer = NgramProposer(shortest, shortest + more)
    with mock.patch.object(match_index, "MAX_STEPS", 60):
        request = make_request(token_ids[:1])
        for end in [*sorted(end for end in calls if end < len(token_ids)), len(token_ids)]:
            request.all_token_ids += token_ids[request.num_tokens : end]
            proposal = proposer.propose(request, max_tokens)
            assert proposal.token_ids == reference(request.all_token_ids, shortest, shortest + more, max_tokens)
            assert len(proposal.chances) == len(proposal.token_ids)
            assert all(0 < chance <= 1 for chance in proposal.chances)


def test_with_few_lengths_drafts_are_exact_in_any_text() -> None:
    # The trigram is long ago, and its last two tokens have occurred more often since than a search takes steps.
    request = make_request([1, 2, 3, 4, *[9, 2, 3] * 50, 1, 2, 3])
    assert NgramProposer(2, 4).propose(request, 2).token_ids == [4, 9]


def test_chances_follow_what_is_accepted() -> None:
    proposer = NgramProposer(2, 2)
    repeats = make_request([1, 2, 3] * 5)
    first = proposer.propose(repeats, 3).chances
    for _ in range(30):
        repeats.all_token_ids += [1, 2, 3]
        proposer.propose(repeats, 3)
    accepted = proposer.propose(repeats, 3).chances
    assert all(later > before for before, later in zip(first, accepted, strict=True))
    for token_id in range(10, 300):
        request = make_request([1, 2, 3] * 5)
        proposer.propose(request, 3)
        request.all_token_ids += [token_id, token_id, token_id]
        proposer.propose(request, 3)
    rejected = proposer.propose(make_request([1, 2, 3] * 5), 3).chances
    assert 0 < rejected[0] < first[0]
    assert rejected[1:] == accepted[1:]  # tokens after one that was rejected say nothing


def test_a_request_with_a_salt_leaves_no_trace_in_the_chances() -> None:
    proposer = NgramProposer(2, 2)
    rates = list(proposer.rates.rates)
    request = make_request([1, 2, 3] * 5, params=SamplingParams(cache_salt="salt"))
    for _ in range(5):
        assert proposer.propose(request, 3).token_ids == [1, 2, 3]
        request.all_token_ids += [1, 2, 3]
    assert proposer.rates.rates == rates


@pytest.mark.parametrize("asked", [True, False])
def test_a_request_that_ended_is_forgotten(asked: bool) -> None:
    proposer = NgramProposer(2, 4)
    request = make_request([1, 2, 1, 2])
    if asked:
        assert proposer.propose(request, 3).token_ids == [1, 2, 1]
    proposer.forget(request)
    namesake = make_request([3, 4, 5, 3, 4], request_id=request.request_id)
    assert proposer.propose(namesake, 3).token_ids == [5, 3, 4]
