"""Pooling: what a request returns that reads hidden states instead of generating tokens, and what a model offers of it.

::

    PoolingParams ─► PoolingInfo.resolve ─► complete PoolingParams ─► scheduler, worker ─► Pooled
     (of the caller)  (of the checkpoint)     (nothing unset)                              (numbers, with their shape)

The parameters have vLLM's names. Once resolved they say everything, so that a replay needs no checkpoint.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from quire_engine.errors import RequestError, quote

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
TASKS: tuple[str, ...] = get_args(PoolingTask)
TOKEN_TASKS = ("token_embed", "token_classify")
"""Tasks that return one row for each token."""
HEAD_TASKS = ("classify", "score", "token_classify")
"""Tasks that return what the checkpoint's head makes of hidden states."""
PoolingType = Literal["LAST", "CLS", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN", "ALL", "STEP"]
POOLING_TYPES: tuple[str, ...] = get_args(PoolingType)
"""Which hidden states become one. `STEP`: those of all tokens with the id `step_tag_id`."""
Activation = Literal["none", "softmax", "sigmoid"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request returns of its prompt's hidden states. What is unset is as the checkpoint says.

    Raises:
        RequestError: a value is out of its range.
    """

    task: str | None = None
    """One of `TASKS`; unset: the checkpoint's first."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of a prompt's beginning, with the special tokens of both ends; -1: as many as the model
    takes. Unset: a longer prompt is rejected."""
    dimensions: int | None = None
    """Keep this many numbers of an embedding, and normalize after that (Matryoshka embeddings)."""
    normalize: bool | None = None
    """Divide an embedding by its norm."""
    use_activation: bool | None = None
    """Apply softmax or sigmoid to a head's numbers."""
    pooling_type: str | None = None
    """One of `POOLING_TYPES`."""
    step_tag_id: int | None = None
    """The token of which `STEP` returns every occurrence."""
    returned_token_ids: tuple[int, ...] | None = None
    """Return these columns of a head alone."""
    prompt_name: str | None = None
    """The name of the checkpoint's prompt to put before the text, such as `query`."""
    segment_start: int | None = None
    """Where the second text of a pair begins; the engine sets it."""

    def __post_init__(self) -> None:
        """Check the values that no model could take."""
        for name, type_, allowed in _TYPES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, type_) or (type_ is int and isinstance(value, bool))):
                raise RequestError.of(name, f"is {quote(value)}; it must be {allowed}")
        keep, size, tag, ids = self.truncate_prompt_tokens, self.dimensions, self.step_tag_id, self.returned_token_ids
        for name, is_good, allowed in (
            ("task", self.task in (None, *TASKS), f"one of {', '.join(TASKS)}"),
            ("pooling_type", self.pooling_type in (None, *POOLING_TYPES), f"one of {', '.join(POOLING_TYPES)}"),
            ("truncate_prompt_tokens", keep is None or keep == -1 or 0 < keep < 2**31, "from 1 to 2**31 - 1, or -1"),
            ("dimensions", size is None or 0 < size < 2**31, "from 1 to 2**31 - 1"),
            ("step_tag_id", tag is None or 0 <= tag < 2**31, "a token id, from 0 to 2**31 - 1"),
            ("returned_token_ids", ids is None or (ids and all(type(one) is int and 0 <= one < 2**31 for one in ids)),
             "a list of integers from 0 to 2**31 - 1"),
        ):  # fmt: skip
            if not is_good:
                raise RequestError.of(name, f"is {quote(getattr(self, name))}; it must be {allowed}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "PoolingParams":
        """Build from decoded JSON. null means unset.

        Raises:
            RequestError: a name is not known, or a value has the wrong type or range.
        """
        given = {name: value for name, value in values.items() if value is not None}
        unknown = next((name for name in given if name not in CLIENT_PARAMETERS), None)
        if unknown is not None:
            raise RequestError(
                unknown, f"{quote(unknown)} is no parameter of pooling; these are {', '.join(CLIENT_PARAMETERS)}"
            )
        if isinstance(given.get("returned_token_ids"), list):
            given["returned_token_ids"] = tuple(given["returned_token_ids"])
        return cls(**given)

    @property
    def needs_every_token(self) -> bool:
        """Whether it reads more hidden states than the last, so that no prefix may come from the cache."""
        return self.task in TOKEN_TASKS or self.pooling_type != "LAST"


_TYPES: tuple[tuple[str, type, str], ...] = (
    ("task", str, "a string"),
    ("truncate_prompt_tokens", int, "an integer"),
    ("dimensions", int, "an integer"),
    ("normalize", bool, "true or false"),
    ("use_activation", bool, "true or false"),
    ("pooling_type", str, "a string"),
    ("step_tag_id", int, "an integer"),
    ("returned_token_ids", tuple, "a list of integers"),
    ("prompt_name", str, "a string"),
)
CLIENT_PARAMETERS = tuple(name for name, _, _ in _TYPES)
"""The parameters that a client may set."""


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a checkpoint offers, by its configuration and by what sentence-transformers stores beside it."""

    tasks: tuple[str, ...] = ("embed", "token_embed")
    """The first is that of requests that name none."""
    can_generate: bool = True
    pooling_type: str = "LAST"
    normalize: bool = True
    embedding_size: int = 0
    dimensions: tuple[int, ...] = ()
    """The sizes that embeddings can be cut to; empty: any."""
    labels: tuple[str, ...] = ()
    """The classes of its head, in order; `id2label`."""
    activation: str = "none"
    """What makes probabilities of the head's numbers: one of `Activation`."""
    prompts: dict[str, str] = {}
    """By name, what precedes a text."""
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    """One of `Similarity`."""
    has_segments: bool = False
    """Whether the layers know the two texts of a pair apart (`token_type_ids`)."""
    max_length: int | None = None
    """Tokens of the longest prompt, if it is shorter than the model's longest sequence."""
    lower_case: bool = False
    """Texts are lower-cased before they are tokenized."""
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None

    def resolve(self, params: PoolingParams) -> PoolingParams:
        """The parameters with the checkpoint's own values for those that are unset.

        Raises:
            RequestError: the checkpoint does not offer what they ask for.
        """
        task = params.task or (self.tasks[0] if self.tasks else None)
        if task is None or task not in self.tasks:
            can = ", ".join((*self.tasks, *(["generate"] if self.can_generate else [])))
            raise RequestError.of("task", f"is {quote(params.task)}; this model offers {can}")
        is_head, is_token = task in HEAD_TASKS, task in TOKEN_TASKS
        step_tag_id = self.step_tag_id if params.step_tag_id is None else params.step_tag_id
        pooling_type = params.pooling_type or self.pooling_type
        if params.pooling_type is None and is_token:
            pooling_type = "ALL" if step_tag_id is None else "STEP"
        if is_token != (pooling_type in ("ALL", "STEP")):
            allowed = "ALL or STEP" if is_token else ", ".join(POOLING_TYPES[:-2])
            raise RequestError.of("pooling_type", f"is {quote(pooling_type)}; for the task {task} it must be {allowed}")
        if pooling_type == "STEP" and step_tag_id is None:
            raise RequestError.of("step_tag_id", "is missing; pooling_type STEP needs it")
        self._check_dimensions(params.dimensions, task)
        columns = self.returned_token_ids if params.returned_token_ids is None else params.returned_token_ids
        if columns is not None and (not is_head or max(columns) >= max(len(self.labels), 1)):
            size = len(self.labels) if is_head else 0
            raise RequestError.of("returned_token_ids", f"is {quote(columns)}; this task has {size} columns of a head")
        return msgspec.structs.replace(
            params,
            task=task,
            pooling_type=pooling_type,
            normalize=not is_head and (self.normalize if params.normalize is None else params.normalize),
            use_activation=is_head and (True if params.use_activation is None else params.use_activation),
            step_tag_id=step_tag_id if pooling_type == "STEP" else None,
            returned_token_ids=columns if is_head else None,
        )

    def longest_prompt(self, max_model_len: int) -> int:
        """Tokens of the longest prompt, for a model that is served with this `max_model_len`."""
        return min(max_model_len, self.max_length or max_model_len)

    def num_bytes(self, params: PoolingParams, prompt_token_ids: Sequence[int]) -> int:
        """Bytes of a prompt's result, at most about.

        Args:
            params: of its request; what is unset is as `resolve` sets it.
            prompt_token_ids: the prompt.
        """
        task, width, rows = params.task or self.tasks[0], params.dimensions or self.embedding_size, 1
        if task in HEAD_TASKS:
            width = max(len(self.labels), 1) if params.returned_token_ids is None else len(params.returned_token_ids)
        if task in TOKEN_TASKS:
            tag = params.step_tag_id
            rows = len(prompt_token_ids) if tag is None else prompt_token_ids.count(tag)
        return 4 * rows * width

    def _check_dimensions(self, dimensions: int | None, task: str) -> None:
        if dimensions is None:
            return
        if task in HEAD_TASKS:
            raise RequestError.of("dimensions", f"is {dimensions}; the task {task} returns no embedding to cut")
        if self.dimensions and dimensions not in self.dimensions:
            allowed = ", ".join(map(str, self.dimensions))
            raise RequestError.of("dimensions", f"is {dimensions}; for this model it must be one of {allowed}")
        if dimensions > self.embedding_size:
            raise RequestError.of("dimensions", f"is {dimensions}; embeddings of this model have {self.embedding_size}")

    def prompt(self, name: str | None) -> str:
        """What to put before a text.

        Raises:
            RequestError: the checkpoint has no prompt of that name.
        """
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise RequestError.of("prompt_name", f"is {quote(name)}; the checkpoint's prompts are: {known}")
        return self.prompts[name]


NO_POOLING_INFO = PoolingInfo()


class Pooled(msgspec.Struct, array_like=True):
    """The result of a pooled request."""

    data: bytes
    """float32."""
    shape: tuple[int, ...]
    """[D] of an embedding, [labels] of a head; [tokens, …] for tasks of tokens."""

    def array(self) -> "npt.NDArray[np.float32]":
        """The numbers; not writable."""
        import numpy as np

        return np.frombuffer(self.data, dtype=np.float32).reshape(self.shape)

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        import numpy as np

        return bool(np.isfinite(self.array()).all())


def pair_texts(
    firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], most: int | None = None
) -> list[tuple[str, str]]:
    """The pairs of texts that are compared; a single text is compared with all of the others.

    Args:
        firsts: one of each pair.
        seconds: the other.
        names: of both, for the error.
        most: pairs that are allowed.

    Raises:
        RequestError: there are too many, or neither as many of both nor a single one.
    """
    number = max(len(firsts), len(seconds))
    if not all(len(texts) in (1, number) for texts in (firsts, seconds)) or (most is not None and number > most):
        limit = "" if most is None else f", and at most {most}"
        raise RequestError(
            names[1], f"{names[1]} holds {len(seconds)} texts for {len(firsts)} of {names[0]}; it must hold as many, "
            f"or one of the two a single one{limit}",
        )  # fmt: skip
    return [(firsts[i % len(firsts)], seconds[i % len(seconds)]) for i in range(number)]


def number_texts(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], list[tuple[int, int]]]:
    """The different texts of pairs, each of which is embedded once, and the numbers of those of each pair."""
    numbers: dict[str, int] = {}
    for text in (text for pair in pairs for text in pair):
        numbers.setdefault(text, len(numbers))
    return list(numbers), [(numbers[first], numbers[second]) for first, second in pairs]


def similarity(kind: str, first: Sequence[float], second: Sequence[float]) -> float:
    """How similar two embeddings are, the more the greater, as sentence-transformers computes it.

    Args:
        kind: one of `Similarity`.
        first: an embedding.
        second: another one, of the same length.
    """
    if kind == "euclidean":
        return -math.dist(first, second)
    if kind == "manhattan":
        return -math.fsum(abs(one - other) for one, other in zip(first, second, strict=True))
    product = math.fsum(map(operator.mul, first, second))
    if kind == "dot":
        return product
    norm = math.hypot(*first) * math.hypot(*second)
    return product / norm if norm else 0.0
