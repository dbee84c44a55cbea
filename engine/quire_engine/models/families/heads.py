"""Heads: what classifiers, rerankers and reward models compute of hidden states, by their architecture."""

import json
import os

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.checkpoints.files import brief, open_regular, read_json
from quire_engine.models.families.bert import ACTIVATIONS
from quire_engine.models.options import HeadOptions, HeadStep

MAX_TOKENIZER_BYTES = 128 << 20
MAX_LABELS = 1 << 16
"""Of a head without `id2label`, whose labels are made up; the frontend has them all."""
CROSS_ENCODER = ("sbert_ce_default_activation_function", "activation_fn")
"""Names of a cross-encoder's activation, the older first, which sentence-transformers stores in `config.json`, in an
object of it, or in a file of its own."""


def read_head(architecture: str, fields: Fields, hidden_size: int) -> HeadOptions | None:
    """The head of an architecture; None if it has none. Raises CheckpointError if a field is wrong."""
    prefix, _, kind = architecture.partition("For")
    token_ids = _read_tokens(fields)
    if token_ids:
        row = HeadStep(name="lm_head", size=1, bias=False)
        return HeadOptions(
            steps=(row,), labels=("LABEL_0",), pooling_type="LAST", activation="sigmoid", token_ids=token_ids
        )
    if kind == "RewardModel":
        steps = _reward_steps(hidden_size, 1)
        return HeadOptions(steps=steps, labels=("reward",), pooling_type="LAST", activation="none")
    if kind not in ("SequenceClassification", "TokenClassification", "ProcessRewardModel"):
        return None
    labels = read_labels(fields)
    if kind == "ProcessRewardModel":
        steps = _reward_steps(hidden_size, len(labels))
        return HeadOptions(steps=steps, labels=labels, pooling_type="STEP", activation="softmax")
    is_token = kind == "TokenClassification"
    steps, pooling_type = _steps(prefix, fields, hidden_size, len(labels), is_token)
    activation = "softmax" if is_token else _read_activation(fields, len(labels))
    return HeadOptions(
        steps=steps, labels=labels, pooling_type="ALL" if is_token else pooling_type, activation=activation
    )


def _read_tokens(fields: Fields) -> tuple[int, ...]:
    """The tokens whose logits are a reranker's score, if the fields name some, as vLLM's `hf_overrides` do for
    Qwen3-Reranker: `"classifier_from_token": ["no", "yes"]`."""
    name = "classifier_from_token"
    tokens = fields.values.get(name)
    if tokens is None:
        return ()
    if not isinstance(tokens, list) or len(tokens) not in (1, 2) or not all(isinstance(one, str) for one in tokens):
        raise fields.error(name, "a list of one token, or of two, such as no and yes")
    path = fields.path.parent / "tokenizer.json"
    with open_regular(path) as file:
        try:
            tokenizer = json.loads(file.read(MAX_TOKENIZER_BYTES))
            known = dict(tokenizer["model"]["vocab"])
            known |= {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
            token_ids = [known.get(token) for token in tokens]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CheckpointError(f"{path}: its vocabulary does not give the ids of {brief(tokens)}") from None
    size = fields.integer("vocab_size", 1, MAX_SIZE)
    found = tuple(one for one in token_ids if type(one) is int and 0 <= one < size)
    if len(found) != len(tokens):
        raise fields.error(name, f"a list of tokens of {path.name}")
    return found


def read_labels(fields: Fields) -> tuple[str, ...]:
    """The names of the classes, in order: `id2label`, or numbered ones."""
    named = fields.inner("id2label").values
    if not named:
        return tuple(f"LABEL_{number}" for number in range(fields.integer("num_labels", 1, MAX_LABELS, 2)))
    labels = {str(key): label for key, label in named.items()}
    if labels.keys() != {str(number) for number in range(len(labels))}:
        raise fields.error("id2label", "an object with the keys 0, 1, … and the name of each class")
    return tuple(str(labels[str(number)]) for number in range(len(labels)))


def _read_activation(fields: Fields, num_labels: int) -> str:
    """As of transformers' pipeline, unless sentence-transformers' cross-encoder says otherwise."""
    stored = fields.path.parent / "config_sentence_transformers.json"
    newest = Fields(stored, read_json(stored) if os.path.lexists(stored) else {})
    inside = fields.inner("sentence_transformers")
    for inner, name in ((newest, CROSS_ENCODER[1]), (inside, CROSS_ENCODER[1]), (fields, CROSS_ENCODER[0])):
        function = inner.values.get(name)
        if function is not None:
            known = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
            ending = function.rpartition(".")[2] if isinstance(function, str) else None
            if ending not in known:
                raise inner.error(name, f"a class of torch.nn: {', '.join(known)}")
            return known[ending]
    problem = fields.values.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"


def _reward_steps(hidden_size: int, num_labels: int) -> tuple[HeadStep, ...]:
    return (
        HeadStep(name="score.0", size=hidden_size, activation="relu"),
        HeadStep(name="score.2", size=num_labels),
    )


def _steps(
    prefix: str, fields: Fields, hidden_size: int, num_labels: int, is_token: bool
) -> tuple[tuple[HeadStep, ...], str]:
    """The layers of a classifier, and how it pools."""
    last = HeadStep(name="classifier", size=num_labels)
    match prefix:
        case "Bert" | "New" | "Gte" | "NomicBert":
            pooler = HeadStep(name="pooler.dense", size=hidden_size, activation="tanh")
            return ((last,) if is_token else (pooler, last)), "CLS"
        case "Roberta" | "XLMRoberta" | "Camembert" | "MPNet" | "JinaEmbeddingsV3":
            dense = HeadStep(name="classifier.dense", size=hidden_size, activation="tanh")
            out = HeadStep(name="classifier.out_proj", size=num_labels)
            return ((last,) if is_token else (dense, out)), "CLS"
        case "DistilBert":
            dense = HeadStep(name="pre_classifier", size=hidden_size, activation="relu")
            return ((last,) if is_token else (dense, last)), "CLS"
        case "ModernBert":
            activation = fields.choice("classifier_activation", tuple(ACTIVATIONS), "gelu")
            head = HeadStep(
                name="head.dense", size=hidden_size, bias=fields.boolean("classifier_bias", False),
                activation=ACTIVATIONS[activation], norm="head.norm", norm_bias=fields.boolean("norm_bias", False),
                norm_eps=fields.positive("norm_eps", 1e-5),
            )  # fmt: skip
            return (head, last), fields.choice("classifier_pooling", ("cls", "mean"), "cls").upper()
        case "EuroBert":
            raise fields.error("architectures", "one whose head is known; EuroBERT serves as an embedder")
        case _:  # decoders
            return (HeadStep(name="score", size=num_labels, bias=is_token),), "LAST"
