"""AdapterConfig: what `adapter_config.json` of an adapter in PEFT's format says. The file is not trusted: fields that
change what is computed in ways that are not supported are rejected by name. Does not use torch.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.files import brief

CONFIG = "adapter_config.json"
PATTERN_SECONDS = 0.05
"""Timeout of one match of a regular expression: the match of a hostile one never ends."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "fan_in_fan_out": (False,), "lora_bias": (False,),
    "trainable_token_indices": (), "layer_replication": ([],), "use_qalora": (False,), "alora_invocation_tokens": ([],),
    "use_bdlora": (), "arrow_config": (), "is_prompt_learning": (False,), "monteclora_config": (), "lora_ga_config": (),
    "kasa_config": (),
}  # fmt: skip
"""Fields whose other values change what is computed in ways that are not supported; null is neutral for all but the
first."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterConfig:
    """The fields that count. Raises CheckpointError if one is malformed, or not supported."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self._values = path, values
        for name, allowed in _NEUTRAL.items():
            value = values.get(name)
            if value not in allowed and not (value is None and name != "peft_type") and value not in ([], {}):
                wanted = " or ".join(repr(one) for one in allowed) or "unset"
                raise self.error(name, f"must be {wanted}: other adapters are not supported")
        start = values.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            raise self.error(
                "init_lora_weights",
                "changes the base's weights, too: save the adapter with path_initial_model_for_weight_conversion",
            )
        self.rank = self._integer("r", values.get("r"))
        self.alpha = self._number("lora_alpha", values.get("lora_alpha", 8))
        self.is_stabilized = values.get("use_rslora") or False
        if not isinstance(self.is_stabilized, bool):
            raise self.error("use_rslora", "must be true or false")
        self.is_dora = values.get("use_dora") or False
        if not isinstance(self.is_dora, bool):
            raise self.error("use_dora", "must be true or false")
        self.ranks = {key: self._integer("rank_pattern", one) for key, one in self._patterns("rank_pattern")}
        self.alphas = {key: self._number("alpha_pattern", one) for key, one in self._patterns("alpha_pattern")}
        self.parameters = self._names("target_parameters")
        """Parts of the names of parameters, whole ones from the end."""
        targets = values.get("target_modules")
        self.targets = targets if isinstance(targets, str) and targets else self._names("target_modules")
        if not self.targets and not self.parameters:
            raise self.error("target_modules", "must be a list of names, a regular expression, or 'all-linear'")
        self.saved = self._names("modules_to_save")
        self.ties_tables = values.get("ensure_weight_tying") is True
        layers = values.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers
        if layers is not None and not (isinstance(layers, list) and all(type(one) is int for one in layers)):
            raise self.error("layers_to_transform", "must be a list of layers' numbers")
        self.layers: list[int] | None = layers or None
        if self.layers is not None and isinstance(self.targets, str):
            raise self.error("layers_to_transform", "must be unset where target_modules is no list, as in PEFT")

    def scaling(self, name: str) -> float:
        """The scale of a layer or a parameter, by transformers' name."""
        alpha, rank = self._of_pattern(self.alphas, name, self.alpha), self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.is_stabilized else rank)

    def rank_of(self, name: str) -> int:
        return int(self._of_pattern(self.ranks, name, self.rank))

    def targets_layer(self, name: str) -> bool:
        """Whether `target_modules` means a layer."""
        if self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return self._matches(self.targets, name, "target_modules")
        if not any(name == one or name.endswith(f".{one}") for one in self.targets):
            return False
        if self.layers is None:
            return True
        number = re.search(r"\.(?:layers|layer|h|blocks)\.(\d+)\.", f".{name}")
        return number is not None and int(number[1]) in self.layers

    def targets_parameter(self, name: str) -> bool:
        """Whether `target_parameters` means a parameter."""
        return any(name == one or name.endswith(f".{one}") for one in self.parameters)

    def error(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {brief(self._values.get(name))}; it {rule}")

    def _of_pattern(self, patterns: Mapping[str, float], name: str, default: float) -> float:
        """As PEFT finds it: the first pattern that the end of the name matches."""
        for pattern, value in patterns.items():
            if self._matches(rf"(.*\.)?({pattern})", name, "rank_pattern or alpha_pattern"):
                return value
        return default

    def _matches(self, pattern: str, name: str, field: str) -> bool:
        try:
            return regex.fullmatch(pattern, name, timeout=PATTERN_SECONDS) is not None
        except TimeoutError:
            raise CheckpointError(f"{self.path}: {field} has {brief(pattern)}, which takes too long to match") from None
        except (regex.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{self.path}: {field} has {brief(pattern)}: {error}") from None

    def _names(self, name: str) -> list[str]:
        value = self._values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise self.error(name, "must be a list of names")
        return value

    def _patterns(self, name: str) -> list[tuple[str, Any]]:
        value = self._values.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return list(value.items())

    def _integer(self, name: str, value: Any) -> int:
        if type(value) is not int or not value >= 1:
            raise self.error(name, "must have integers of at least 1" if "pattern" in name else "must be 1 or more")
        return value

    def _number(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) < 1e9:
            raise self.error(name, f"must {'have numbers' if 'pattern' in name else 'be a number'} below 1e9")
        return float(value)
