"""EPLBConfig: when and how experts are spread anew over the ranks, under the keys of vLLM's `eplb_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire_engine.config.checks import check, check_int

_NEUTRAL = ("log_balancedness", "log_balancedness_interval", "use_async", "communicator")
"""vLLM's keys that ask for nothing here: balancedness is a metric, and weights move between steps, some at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EPLBConfig:
    """Expert parallelism load balancing."""

    window_size: int = 1000
    """Steps whose load decides where experts go."""
    step_interval: int = 3000
    """Steps from one time that experts are spread anew to the next."""
    num_redundant_experts: int = 0
    """Experts of a layer that all ranks together hold beside one of each: further replicas of the busiest. Together
    with `num_experts` it must be a multiple of `tensor_parallel_size`."""

    def __post_init__(self) -> None:
        check_int("eplb_config: window_size", self.window_size, 1)
        check_int("eplb_config: step_interval", self.step_interval, 1)
        check_int("eplb_config: num_redundant_experts", self.num_redundant_experts, 0)

    @classmethod
    def from_value(cls, value: Any) -> "EPLBConfig":
        """The setting as it stands in `model.json`.

        Raises:
            ValueError: it is no object, or a key or value is wrong.
        """
        check(isinstance(value, Mapping), "eplb_config", value, "an object")
        known = [item.name for item in fields(cls)]
        for name in value:
            check(name in (*known, *_NEUTRAL, "policy"), "eplb_config", value, f"of {', '.join(known)}")
        check(value.get("policy", "default") == "default", "eplb_config: policy", value.get("policy"), "'default'")
        return cls(**{name: value[name] for name in known if name in value})
