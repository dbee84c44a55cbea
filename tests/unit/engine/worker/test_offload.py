"""HostWeights: weights leave their device and come back, whatever holds them. A CPU stands in for the device."""

from dataclasses import dataclass

import pytest
import torch
from quire_engine.worker import offload
from quire_engine.worker.offload import HostWeights, weight_storages
from torch import nn


@dataclass
class Packed:
    codes: torch.Tensor
    scales: tuple[torch.Tensor, ...]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.layer.alias = self.layer.weight.detach()[:8]  # a view of the same storage
        self.register_buffer("angles", torch.randn(32))
        self.packed = Packed(torch.randint(0, 100, (16, 4)), (torch.randn(16), torch.randn(3)))

    def everything(self) -> list[torch.Tensor]:
        return [
            self.layer.weight, self.layer.bias, self.layer.alias, self.angles, self.packed.codes, *self.packed.scales,
        ]  # fmt: skip


def test_weights_leave_and_come_back_in_the_same_tensors() -> None:
    model = Model()
    held = [tensor.detach() for tensor in model.everything()]
    before = [tensor.clone() for tensor in held]
    storages = weight_storages(model)
    assert len(storages) == 6, "the view shares a storage"
    host = HostWeights(model)
    assert [one.nbytes() for one in storages] == [0] * 6
    host.restore()
    for tensor, expected in zip(held, before, strict=True):
        assert torch.equal(tensor, expected)


def test_without_room_for_all_none_is_back_and_it_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before = [tensor.detach().clone() for tensor in model.everything()]
    storages = weight_storages(model)
    host = HostWeights(model)
    copies = list(host._copies)

    class Full:
        def nbytes(self) -> int:
            raise torch.OutOfMemoryError("no room")

    host._copies.append((storages[0], Full()))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        host.restore()
    assert [one.nbytes() for one in storages] == [0] * 6
    host._copies = copies
    host.restore()
    assert all(map(torch.equal, model.everything(), before))


def test_a_host_without_memory_for_them_is_named_and_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(offload, "available_memory_bytes", lambda: 100)
    with pytest.raises(ValueError, match=r"level is 1.* 0 MiB are free; set level to 2"):
        HostWeights(model)
    assert all(one.nbytes() for one in weight_storages(model))
    assert weight_storages(object()) == []
