"""The table of rotary angles."""

from typing import Any

import torch
from quire_engine.models.checkpoint import RopeConfig
from quire_engine.models.layers import rope_cos_sin
from torch.utils._python_dispatch import TorchDispatchMode


class Devices(TorchDispatchMode):
    """Notes where ops compute."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.of[func.name()] = result.device.type
        return result


def test_angles_are_computed_on_the_host_whichever_device_they_are_for() -> None:
    rope = RopeConfig(rope_type="llama3", rope_theta=5e5, factor=8.0)
    with torch.device("meta"), Devices() as devices:
        table = rope_cos_sin(rope, 64, 100)
    assert (table.device.type, table.shape) == ("meta", (100, 64))
    assert {device for name, device in devices.of.items() if name != "aten::_to_copy"} == {"cpu"}
    assert {"aten::pow.Scalar", "aten::cos", "aten::sin"} <= devices.of.keys()
