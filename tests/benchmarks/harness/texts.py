"""The texts that speculative decoding is measured with: a prompt each, and what the model is to say.

=============  ========================================================  =============================================
workload       prompt                                                    text
=============  ========================================================  =============================================
`copy`         a piece of a file of Python's standard library, and the   the same piece: two names are others, some
               wish to have it edited                                    lines are gone, some are new
`agentic`      what an agent may do, and a listing of files              its calls of tools and their results as JSON:
                                                                         the same fields in turn, other values
`chat`         a question                                                prose of Python's documentation, which
                                                                         repeats what prose repeats
`misleading`   random ids                                                random ids of only 64: what comes after two
                                                                         of them says nothing about the next time
`random`       random ids                                                none: what the model says, at temperature 1
`greedy`       random ids                                                none: what the model says, greedily
=============  ========================================================  =============================================

`files` and `files_sampled` have no text either: their prompts are pieces of files that tinypy was trained with, and it
goes on with them greedily, or at temperature 0.7.

Ids are those of the checkpoint's own tokenizer. Everything is the same at each run with the same Python, and no text is
given twice: what has been said before could be drafted from.
"""

import keyword
import pydoc_data.topics
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from .training_text import training_files

__all__ = ["WORKLOADS", "NoMoreTextsError", "Task", "Texts", "edit_lines"]

WORKLOADS = ("copy", "agentic", "chat", "random", "greedy", "misleading")

WINDOW_LINES = 240
"""Of a file, before it is cut to the length of the prompt."""
BEGINNING_LINES = 120
"""The same of a file that a model is to go on with."""
FILES_AT_ONCE = 4
"""Pieces of files among the tasks that are asked for together: some of the many edits are of the same."""
WISH_TOKENS = 80
"""At most, of what a prompt of `copy` says besides the file."""
RENAMES, RENAMED_USES, DROPPED_SHARE, ADDED_SHARE = 2, range(2, 7), 0.04, 0.04
"""Names that are changed, how often one may occur, and shares of the lines."""
NUM_MISLEADING_IDS = 64
RANDOM_PROMPT_TOKENS = 64
FIRST_ID = 2
"""Below are special tokens."""
NOUNS = """
    archive batch branch buffer cache channel client cluster column commit config cursor device driver engine event
    export feature field filter frame graph group handler header index ingest journal kernel layer ledger limit
    loader lock mapper marker matrix metric mirror module monitor node offset packet parser patch payload pipeline
    plugin policy pool probe profile proxy queue quota reader record region replica report request resolver response
    router sample schema scope segment sensor series session shard signal slot snapshot socket source stage status
    storage stream summary switch symbol table target task template thread ticket timer token topic tracker trigger
    tunnel update upload vector version view volume watcher window worker writer zone
"""
WORDS = NOUNS.split()
TOOLS = ("read_file", "write_file", "search_code", "run_tests", "list_folder", "apply_patch", "run_command", "open_url")
AGENT_RULES = """\
You are an agent that works on the repository {name}. You act by calling tools, one after another, and see what came
of each call before you make the next one. The tools are: read_file shows lines of a file; write_file replaces a file;
search_code finds a pattern; run_tests runs a part of the test suite; list_folder shows what a folder holds;
apply_patch changes lines; run_command starts a program; open_url fetches a page. Work in small steps. When a test
fails, look at what it says before you change anything. Do not touch what the task does not name. At the end, say in
two sentences what you have changed and why.

The files of the repository:
{listing}

The task: the {words} is slow for large inputs. Find out why, mend it, and show that the tests pass.
"""


class NoMoreTextsError(Exception):
    """All have been given. The message says what to ask for less of."""


@dataclass(frozen=True)
class Task:
    """One request."""

    prompt: list[int]
    text: list[int] | None
    """What is forced; None: what the model says by itself."""


class Texts:
    """Gives tasks, each of them once.

    Args:
        encode: text → token ids.
        vocab_size: ids of random tokens are below.
        num_tokens: length of every text.
        max_prompt_tokens: prompts of `copy` have nearly as many, those of `agentic` at most half.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], vocab_size: int, num_tokens: int, max_prompt_tokens: int
    ) -> None:
        self._encode = encode
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._numbers = count()
        self._windows: Iterator[str] = iter(_windows())
        self._beginnings = _beginnings()
        self._prose = self._prose_chunks()

    def make(self, workload: str, number: int) -> list[Task]:
        """Tasks to be carried out together.

        Raises:
            NoMoreTextsError: there is not so much text.
            ValueError: there is no such workload, or a file is shorter than `num_tokens`.
        """
        if workload == "copy":
            windows = [self._next_window() for _ in range(min(number, FILES_AT_ONCE))]
            return [self._copy(windows[i % len(windows)], self._rng()) for i in range(number)]
        make = {
            "agentic": self._agentic, "chat": self._chat, "random": self._own, "greedy": self._own,
            "misleading": self._misleading,
        }.get(workload)  # fmt: skip
        if make is None:
            raise ValueError(f"there is no workload {workload!r}; there are {', '.join(WORKLOADS)}")
        return [make(self._rng()) for _ in range(number)]

    def continued_files(self, number: int) -> list[Task]:
        """Beginnings of pieces of files that tinypy was trained with, for it to go on with them.

        Raises:
            NoMoreTextsError: there are no more pieces.
        """
        pieces = [next(self._beginnings) for _ in range(number)]
        return [Task(self._encode(piece)[: self._max_prompt_tokens], None) for piece in pieces]

    def looping(self, number: int) -> list[Task]:
        """A few tokens again and again: it warms up the steps with drafts."""
        tasks = []
        for _ in range(number):
            loop = self._random_ids(self._rng(), 8) * self._num_tokens
            tasks.append(Task(loop[:32], loop[: self._num_tokens]))
        return tasks

    def _rng(self) -> Random:
        return Random(next(self._numbers))

    def _next_window(self) -> str:
        window = next(self._windows, None)
        if window is None:
            raise NoMoreTextsError("the standard library has no more files: fewer rounds or streams")
        return window

    def _copy(self, window: str, rng: Random) -> Task:
        lines = self._first_lines(window, self._max_prompt_tokens - WISH_TOKENS)
        edited, names = edit_lines(lines, rng)
        renames = ", ".join(f"`{old}` is to be `{new}`" for old, new in names.items())
        wish = f"```\n{renames}. Drop what nobody needs, log what matters. Give me the whole file.\n\n```python\n"
        prompt = self._encode("Edit this file.\n\n```python\n" + "".join(lines)) + self._encode(wish)
        return Task(prompt, self._cut(self._encode("".join(edited))))

    def _first_lines(self, window: str, num_tokens: int) -> list[str]:
        """As many lines as have at most so many tokens."""
        lines, left = window.splitlines(keepends=True), num_tokens
        for i, line in enumerate(lines):
            left -= len(self._encode(line))
            if left < 0:
                return lines[:i]
        return lines

    def _agentic(self, rng: Random) -> Task:
        name, *words = rng.sample(WORDS, 4)
        folders = ["/".join(rng.sample(WORDS, 2)) for _ in range(4)]
        paths = [f"{rng.choice(folders)}/{'_'.join(rng.sample(WORDS, 2))}.py" for _ in range(40)]
        rules = AGENT_RULES.format(name=name, words=" ".join(words), listing="\n".join(sorted(paths)))
        # The rules and the listing's end are left out of prompts that are too short for them.
        prompt = self._encode(rules)[: self._max_prompt_tokens // 2]
        fields = rng.sample(WORDS, 6)
        tools = [(tool, [*fields, *rng.sample(WORDS, 3)]) for tool in rng.sample(TOOLS, 2)]
        step, ids = 0, list[int]()
        while len(ids) < self._num_tokens:
            step += 1
            ids += self._encode(_tool_call(step, *rng.choice(tools), rng.choice(paths), rng))
        return Task(prompt, ids[: self._num_tokens])

    def _chat(self, rng: Random) -> Task:
        question = f"Tell me about the {' '.join(rng.sample(WORDS, 3))}, and what is to be known about its use."
        return Task(self._encode(f"user: {question}\nassistant:"), next(self._prose))

    def _prose_chunks(self) -> Iterator[list[int]]:
        """All topics of Python's documentation, cut into texts of the right length."""
        for _, text in sorted(pydoc_data.topics.topics.items()):
            ids = self._encode(text)
            for start in range(0, len(ids) - self._num_tokens + 1, self._num_tokens):
                yield ids[start : start + self._num_tokens]
        raise NoMoreTextsError("the documentation has no more prose: fewer rounds, streams or tokens")

    def _own(self, rng: Random) -> Task:
        return Task(self._random_ids(rng, RANDOM_PROMPT_TOKENS), None)

    def _misleading(self, rng: Random) -> Task:
        few = self._random_ids(rng, NUM_MISLEADING_IDS)
        ids = [rng.choice(few) for _ in range(RANDOM_PROMPT_TOKENS + self._num_tokens)]
        return Task(ids[:RANDOM_PROMPT_TOKENS], ids[RANDOM_PROMPT_TOKENS:])

    def _random_ids(self, rng: Random, number: int) -> list[int]:
        return [rng.randrange(FIRST_ID, self._vocab_size) for _ in range(number)]

    def _cut(self, ids: list[int]) -> list[int]:
        if len(ids) < self._num_tokens:
            raise ValueError(f"a text has {len(ids)} tokens instead of {self._num_tokens}: ask for fewer")
        return ids[: self._num_tokens]


def edit_lines(lines: list[str], rng: Random) -> tuple[list[str], dict[str, str]]:
    """Source lines with some names changed, some lines dropped and some added, and the names: old → new."""
    words = Counter(re.findall(r"\b[a-z_][a-z0-9_]{3,}\b", "".join(lines)))
    candidates = sorted(word for word, uses in words.items() if uses in RENAMED_USES and not keyword.iskeyword(word))
    old_names = rng.sample(candidates, min(RENAMES, len(candidates)))
    names = {name: "_".join(rng.sample(WORDS, 2)) for name in old_names}
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names)) or '(?!)'})\b")
    edited = []
    for line in lines:
        if line.strip() and rng.random() < DROPPED_SHARE:
            continue
        edited.append(pattern.sub(lambda match: names[match[1]], line))
        if rng.random() < ADDED_SHARE:
            indent = line[: len(line) - len(line.lstrip())].strip("\n")
            edited.append(f'{indent}logger.debug("{" ".join(rng.sample(WORDS, 3))}: %r", {rng.choice(WORDS)})\n')
    return edited, names


def _windows() -> list[str]:
    """Pieces of the standard library's files, in an order of their own."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return _pieces((file.read_text(encoding="utf-8", errors="replace") for file in files), WINDOW_LINES)


def _beginnings() -> Iterator[str]:
    """The same of those that tinypy was trained with, which are read when the first is asked for."""
    yield from _pieces(training_files(), BEGINNING_LINES)
    raise NoMoreTextsError("tinypy was trained with no more files: fewer rounds or streams")


def _pieces(texts: Iterable[str], num_lines: int) -> list[str]:
    pieces = []
    for text in texts:
        lines = text.splitlines(keepends=True)
        pieces += [
            "".join(lines[start : start + num_lines]) for start in range(0, len(lines) - num_lines + 1, num_lines)
        ]
    Random(0).shuffle(pieces)
    return pieces


def _tool_call(step: int, tool: str, fields: list[str], path: str, rng: Random) -> str:
    """A call and what came of it: the calls of a tool have the same fields, which no other task has, and new values."""
    where, start, end, result, status, duration, *own = fields
    line = rng.randrange(1, 900)
    return f"""{{
  "step": {step},
  "tool": "{tool}",
  "arguments": {{"{where}": "{path}", "{start}_line": {line}, "{end}_line": {line + rng.randrange(5, 60)}}},
  "{result}": {{
    "{status}": "{rng.choice(("ok", "ok", "ok", "failed"))}",
    "{own[0]}_count": {rng.randrange(1000)},
    "{own[1]}_{own[2]}": "{rng.choice(WORDS)}",
    "{duration}_ms": {rng.randrange(3, 5000)}
  }}
}}
"""
