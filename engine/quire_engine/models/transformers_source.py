"""What the installed transformers says of its models, read from its source: importing it takes seconds and torch."""

import ast
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAUSAL_LM = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Two files of transformers: a model's code, and its configuration's."""

    modeling: str
    """The text of the first."""
    attribute_map: Mapping[str, str]
    """The usual name of a field of `config.json` → the name that it has in this model's."""
    defaults: Mapping[str, Any]
    """By the name in this model's `config.json`; fields without a plain default are left out."""

    def names_of(self, name: str) -> list[str]:
        """The names that a field of `config.json` may have in this model's, its own first."""
        own = self.attribute_map.get(name, name)
        return [own, name, *(alias for alias, field in self.attribute_map.items() if field == own)]

    def has(self, pattern: str) -> bool:
        """Whether the code has this regular expression somewhere."""
        return re.search(pattern, self.modeling) is not None


def class_of(model_type: str) -> str | None:
    """The class that computes transformers' causal language model of a type; None if it has none.

    Args:
        model_type: as in `config.json`.
    """
    return dict(_mapping(CAUSAL_LM)).get(model_type)


def find_model(architecture: str, model_type: str) -> ModelSource | None:
    """The source of a model that transformers calls a causal language model; None if it has none such.

    Args:
        architecture: the class, such as `GPT2LMHeadModel`.
        model_type: as in `config.json`.
    """
    types = [one for one, name in _mapping(CAUSAL_LM) if name == architecture]
    if model_type not in types:
        return None
    # A few types are one model's in the folder of another: of its text part, or with nothing but a new name.
    names = [name.replace("-", "_") for name in (model_type, model_type.removesuffix("_text"), *types)]
    modelings, configurations = (
        [path for name in names if (path := _models() / name / f"{kind}_{name}.py").is_file()]
        for kind in ("modeling", "configuration")
    )
    if not modelings or not configurations:
        return None
    return ModelSource(modelings[0].read_text("utf-8"), *_config_class(configurations[0], model_type))


def is_listed(architecture: str, kind: str) -> bool:
    """Whether transformers has a model among those of a kind.

    Args:
        architecture: the class.
        kind: of `models/auto/modeling_auto.py`, such as `SEQ_TO_SEQ_CAUSAL_LM`.
    """
    return any(name == architecture for _, name in _mapping(f"MODEL_FOR_{kind}_MAPPING_NAMES"))


def _models() -> Path:
    spec = importlib.util.find_spec("transformers")  # imports nothing
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "models"


def _mapping(name: str) -> list[tuple[str, str]]:
    """Model types and classes of a mapping there."""
    source = (_models() / "auto" / "modeling_auto.py").read_text("utf-8")
    found = re.search(rf"^{name} = OrderedDict\((.*?)^\)", source, re.DOTALL | re.MULTILINE)
    assert found is not None, f"transformers has no {name}"
    pairs: list[tuple[str, str | tuple[str, ...]]] = ast.literal_eval(found[1].strip())
    return [(kind, one) for kind, names in pairs for one in ([names] if isinstance(names, str) else names)]


def _config_class(path: Path, model_type: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The attribute map and the plain defaults of the class for a model type, or of the file's first."""
    classes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    values = [_class_values(node) for node in classes]
    chosen = next((one for one in values if one.get("model_type") == model_type), values[0] if values else {})
    return chosen.get("attribute_map") or {}, chosen


def _class_values(node: ast.ClassDef) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        try:
            values[name] = ast.literal_eval(value)
        except ValueError:  # an expression
            continue
    return values
