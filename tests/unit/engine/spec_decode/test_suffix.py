"""Suffix decoding drafts what most often followed the longest match, in the request and in what others got."""

from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.spec_decode import match_index, suffix
from quire_engine.spec_decode.suffix import SuffixProposer
from support.scheduling import make_request

TEXTS = st.integers(1, 4).flatmap(lambda vocab_size: st.lists(st.integers(0, vocab_size), min_size=1, max_size=60))
SALT = SamplingParams(cache_salt="salt")


def make_proposer(**settings: float) -> SuffixProposer:
    return SuffixProposer(**{"shared_tokens": 4096, **settings})


def share(proposer: SuffixProposer, *outputs: Sequence[int], params: SamplingParams | None = None) -> None:
    """Let requests end with these outputs."""
    for output in outputs:
        request = make_request([0], params=params)
        request.all_token_ids += output
        proposer.forget(request)


def draft(proposer: SuffixProposer, token_ids: Sequence[int], max_tokens: int = 8, **params: str) -> list[int]:
    """For a request that is new and has all these tokens."""
    return proposer.propose(make_request(token_ids, params=SamplingParams(**params)), max_tokens).token_ids


def continuations(token_ids: list[int], depth: int, num_tokens: int) -> tuple[int, list[list[int]]]:
    """Length of the longest match, and what follows where it is, by comparing all places."""
    lengths = {}
    for end in range(1, len(token_ids)):
        length = 0
        while length < min(end, depth) and token_ids[end - 1 - length] == token_ids[-1 - length]:
            length += 1
        lengths[end] = length
    longest = max(lengths.values(), default=0)
    found = []
    for end, length in lengths.items():
        text = list(token_ids)
        for i in range(num_tokens):
            text.append(text[end + i])
        if length == longest > 0:
            found.append(text[len(token_ids) :])
    return longest, found


@given(TEXTS, st.integers(1, 9), st.integers(2, 24), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_draft_continues_the_longest_match(
    token_ids: list[int], max_tokens: int, max_tree_depth: int, max_spec_factor: float
) -> None:
    proposer = make_proposer(max_tree_depth=max_tree_depth, max_spec_factor=max_spec_factor)
    longest, found = continuations(token_ids, max_tree_depth, max_tokens)
    with mock.patch.object(match_index, "MAX_STEPS", 60), mock.patch.object(suffix, "MAX_STEPS", 60):
        proposal = proposer.propose(make_request(token_ids), max_tokens)
    drafts, num_tokens = proposal.token_ids, len(proposal.token_ids)
    limit = max((min(int(n * max_spec_factor), max_tree_depth - n) for n in range(longest + 1)), default=0)
    assert num_tokens <= min(max_tokens, limit)
    assert len(proposal.chances) == num_tokens
    assert all(0 < chance <= 1 for chance in proposal.chances)
    # The chosen token has most votes of the places that continued as the draft, and it ends where too few are left.
    probability = 1.0
    for index in range(min(max_tokens, limit)):
        ballot = [text[index] for text in found if text[:index] == drafts[:index]]
        most = max(ballot.count(token_id) for token_id in ballot)
        probability *= most / len(ballot)
        if index < num_tokens:
            assert ballot.count(drafts[index]) == most
            assert probability >= 0.1
        else:
            assert probability < 0.1
            break


@given(TEXTS, st.lists(st.integers(1, 60)))
def test_it_catches_up_in_any_pieces(token_ids: list[int], calls: list[int]) -> None:
    proposer = make_proposer(max_cached_requests=0)
    request = make_request(token_ids[:1])
    for end in sorted(end for end in calls if end < len(token_ids)):
        request.all_token_ids += token_ids[request.num_tokens : end]
        proposer.propose(request, 4)
    request.all_token_ids += token_ids[request.num_tokens :]
    assert proposer.propose(request, 4).token_ids == draft(proposer, token_ids, 4)


def test_most_votes_win_and_of_several_the_latest() -> None:
    def voted(*followers: int) -> list[int]:
        places = [token_id for i, follower in enumerate(followers) for token_id in (1, 2, follower, 100 + i)]
        return draft(make_proposer(max_cached_requests=0), [*places, 1, 2], 1)

    assert voted(7, 8, 7, 9) == [7]
    assert voted(7, 8, 9, 9, 7) == [7]
    assert voted(7, 9, 7, 9, 5) == [9]


def test_those_who_lose_a_vote_have_no_more() -> None:
    others = [[5, 5, 1, 2, 3, *rest] for rest in ([7, 1], [7, 2], [8, 3], [8, 3], [7, 1])]
    proposer = make_proposer()
    share(proposer, *others)
    proposal = proposer.propose(make_request([1, 2, 3]), 8)
    assert proposal.token_ids == [7, 1]  # and with the losers' votes, 3
    assert proposal.chances == [proposer.rates.rates[cell] for cell in (5 * 10 + 2 + 30, 5 * 10 + 3 + 30)]


def test_a_draft_ends_where_it_is_not_likely_enough() -> None:
    outputs = [[1, 2, 3, 4, 5, first, second, 9] for first in (6, 7) for second in (1, 2)]
    for least, num_tokens in ((0.6, 0), (0.5, 1), (0.3, 1), (0.25, 5), (0.1, 5)):
        proposer = make_proposer(min_token_prob=least)
        share(proposer, *outputs)
        token_ids = draft(proposer, [1, 2, 3, 4, 5])
        # The last text's end is known: 9, and no draft goes beyond.
        assert token_ids == [7, 2, 9][: min(num_tokens, 3)], least


def test_a_text_that_ends_votes_for_the_end() -> None:
    proposer = make_proposer()
    share(proposer, [1, 2, 3, 4, 9], [1, 2, 3, 4], [1, 2, 3, 4])
    assert draft(proposer, [1, 2, 3]) == [4]
    share(proposer, [1, 2, 3, 4, 9], [1, 2, 3, 4, 9])
    assert draft(proposer, [1, 2, 3]) == [4, 9]


def test_the_draft_that_is_likely_longer_is_taken() -> None:
    own = [1, 2, 3, 50, 51, 52, 1, 2, 3]
    proposer = make_proposer()
    share(proposer, [9, 9, 3, 60, 61])
    assert draft(proposer, own) == [50, 51, 52]  # the shared match is shorter
    share(proposer, [52, 1, 2, 3, 60, 61, 62, 63])
    assert draft(proposer, own) == [60, 61, 62, 63]


def test_outputs_are_shared_and_prompts_are_not() -> None:
    proposer = make_proposer()
    request = make_request([11, 12, 13, 14, 15, 16])
    request.all_token_ids += [21, 22, 23, 24, 25, 26]
    proposer.propose(request, 4)
    assert draft(proposer, [9, 21, 22, 23]) == []  # while it runs it is its own
    proposer.forget(request)
    assert proposer.shared is not None
    assert draft(proposer, [9, 21, 22, 23]) == [24, 25, 26]
    assert draft(proposer, [9, 11, 12, 13]) == []
    assert draft(proposer, [9, 14, 15, 16]) == []  # nor does a match go from the prompt into the output


@pytest.mark.parametrize("params", [SamplingParams(), SALT])
@pytest.mark.parametrize("asked", [True, False])
def test_a_request_that_ended_is_forgotten(asked: bool, params: SamplingParams) -> None:
    proposer = make_proposer()
    request = make_request([1, 2, 1, 2], params=params)
    if asked:
        assert proposer.propose(request, 4).token_ids == [1, 2]
    proposer.forget(request)
    namesake = make_request([3, 4, 5, 3, 4], request_id=request.request_id, params=params)
    assert proposer.propose(namesake, 4).token_ids == [5, 3]


def test_salted_requests_neither_read_nor_write_what_is_shared() -> None:
    proposer = make_proposer()
    share(proposer, [1, 2, 3, 4, 5, 6], params=SALT)
    assert draft(proposer, [1, 2, 3]) == []
    share(proposer, [1, 2, 3, 4, 5, 6])
    assert draft(proposer, [1, 2, 3], cache_salt="salt") == []
    assert draft(proposer, [1, 2, 3]) == [4, 5, 6]
    assert draft(proposer, [1, 2, 3, 7, 1, 2, 3], cache_salt="salt") == [7, 1, 2]


def test_without_cached_requests_only_the_request_itself_counts() -> None:
    proposer = make_proposer(max_cached_requests=0)
    share(proposer, [1, 2, 3, 4, 5, 6])
    assert draft(proposer, [1, 2, 3]) == []
    assert draft(proposer, [1, 2, 3, 7, 1, 2, 3]) == [7, 1, 2]


def test_what_is_shared_is_bounded_by_requests() -> None:
    proposer = make_proposer(max_cached_requests=3)
    share(proposer, *([10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(1, 6)))
    assert proposer.shared is not None
    assert proposer.shared.num_texts == 3
    drafts = [draft(proposer, [10 * i, 10 * i + 1, 10 * i + 2]) for i in range(1, 6)]
    assert drafts == [[], [], [33], [43], [53]]


def test_what_is_shared_is_bounded_by_tokens() -> None:
    proposer = make_proposer(shared_tokens=1024)
    assert proposer.shared is not None
    num_bytes = proposer.shared.num_bytes
    for i in range(300):
        share(proposer, range(100 * i, 100 * i + 100))
        assert proposer.shared.num_tokens < 1024
    assert proposer.shared.num_bytes == num_bytes
    found = [i for i in range(300) if draft(proposer, range(100 * i, 100 * i + 20), 3)]
    assert found == list(range(300 - proposer.shared.num_texts, 300))
    assert 5 < len(found) < 11


def test_no_draft_without_a_token_to_go_by() -> None:
    proposer = make_proposer()
    request: Request = make_request([5])
    assert proposer.propose(request, 4).token_ids == []
    assert draft(make_proposer(max_tree_depth=1), [5, 5, 5]) == []  # the match takes all of the tree
