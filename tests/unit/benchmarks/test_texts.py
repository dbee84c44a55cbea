"""The texts of the benchmark of speculative decoding: always the same, each once, and as repetitive as they say."""

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from benchmarks.harness.texts import WORKLOADS, NoMoreTextsError, Task, Texts, edit_lines
from benchmarks.harness.training_text import training_files

VOCAB_SIZE = 5000
FORCED = ("copy", "agentic", "chat", "misleading")
IDS: dict[str, int] = {}


def encode(text: str) -> list[int]:
    """A token for each word, run of blanks and sign."""
    return [IDS.setdefault(token, 2 + len(IDS)) for token in re.findall(r"\w+|\s+|.", text)]


def make_texts(num_tokens: int = 200, max_prompt_tokens: int = 800) -> Texts:
    return Texts(encode, VOCAB_SIZE, num_tokens, max_prompt_tokens)


def found_share(text: Sequence[int], places: Sequence[int], size: int) -> float:
    """Share of the n-grams of a text that are somewhere else."""

    def grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]

    known = set(grams(places))
    own = grams(text)
    return sum(gram in known for gram in own) / len(own)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_texts_are_always_the_same_and_never_given_twice(workload: str) -> None:
    texts, same = make_texts(), make_texts()
    tasks = [task for number in (1, 4, 5) for task in texts.make(workload, number)]
    assert tasks == [task for number in (1, 4, 5) for task in same.make(workload, number)]
    whole = {(*task.prompt, *(task.text or ())) for task in tasks}
    assert len(whole) == len(tasks) == 10


@pytest.mark.parametrize("workload", WORKLOADS)
def test_lengths(workload: str) -> None:
    for task in make_texts().make(workload, 5):
        assert 0 < len(task.prompt) <= 800
        assert (task.text is None) == (workload not in FORCED)
        assert task.text is None or len(task.text) == 200


def test_copies_are_in_the_prompt_but_for_the_edits() -> None:
    for task in make_texts().make("copy", 8):
        assert task.text is not None
        assert task.text != task.prompt[: len(task.text)]
        assert 0.6 < found_share(task.text, task.prompt, 4) < 1


def test_agents_repeat_themselves_and_not_their_prompt() -> None:
    for task in make_texts(400).make("agentic", 8):
        assert task.text is not None
        assert found_share(task.text[200:], task.text[:200], 3) > 0.6
        assert found_share(task.text, task.prompt, 4) < 0.2


def test_agents_have_little_in_common() -> None:
    first, second = make_texts(400).make("agentic", 2)
    assert first.text is not None
    assert second.text is not None
    own = found_share(second.text[200:], second.text[:200], 6)
    assert found_share(second.text[200:], first.text, 6) < own / 2


def test_prose_is_not_in_its_prompt() -> None:
    for task in make_texts().make("chat", 8):
        assert task.text is not None
        assert found_share(task.text, task.prompt, 4) < 0.05


def test_misleading_text_repeats_pairs_but_not_what_follows() -> None:
    (task,) = make_texts(2000).make("misleading", 1)
    assert task.text is not None
    assert found_share(task.text[1000:], task.text[:1000], 2) > 0.15
    assert found_share(task.text[1000:], task.text[:1000], 4) < 0.02


def test_files_to_go_on_with_are_of_those_that_tinypy_learnt() -> None:
    tasks = make_texts().continued_files(3)
    files, words = training_files(), {number: word for word, number in IDS.items()}
    assert len({tuple(task.prompt) for task in tasks}) == 3
    for task in tasks:
        assert task.text is None
        assert 100 < len(task.prompt) <= 800
        assert any("".join(words[i] for i in task.prompt) in file for file in files)


def test_files_kept_for_validation_are_not_among_those_learnt() -> None:
    files, library = training_files(), Path(sysconfig.get_paths()["stdlib"])
    assert (library / "argparse.py").read_text(encoding="utf-8") in files
    assert (library / "stat.py").read_text(encoding="utf-8") not in files


def test_looping_texts_go_on_as_they_began() -> None:
    (task,) = make_texts().looping(1)
    assert task == Task(task.prompt, [task.prompt[i % 8] for i in range(200)])


def test_the_end_of_the_supply_is_told() -> None:
    texts = make_texts(num_tokens=20_000)
    with pytest.raises(NoMoreTextsError, match="fewer rounds"):
        texts.make("chat", 1000)


def test_too_long_copies_and_unknown_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="instead of 5000"):
        make_texts(num_tokens=5000).make("copy", 1)
    with pytest.raises(ValueError, match="no workload 'poem'; there are copy"):
        make_texts().make("poem", 1)


def test_edits() -> None:
    lines = [line for i in range(60) for line in (f"def function_{i}(value):\n", f"    return alpha_{i % 20}\n")]
    edited, names = edit_lines(lines, Random(1))
    assert len(names) == 2
    assert all(re.fullmatch(r"alpha_\d+", old) for old in names)  # `value` and `return` are used too often
    text = "".join(edited)
    for old, new in names.items():
        assert new in text
        assert not re.search(rf"\b{old}\b", text)
    added = [line for line in edited if "logger.debug" in line]
    dropped = len(lines) + len(added) - len(edited)
    assert 0 < len(added) < 15
    assert 0 < dropped < 15


def test_lines_without_names_are_left_alone() -> None:
    edited, names = edit_lines(["\n"] * 5, Random(1))
    assert names == {}
    assert set(edited) == {"\n"}
