"""HostWeights: the weights of a model on a GPU, in host memory while the engine sleeps.

The tensors stay, and only their storage is freed: all that refers to them finds them again after `restore`, whatever
packed form holds them. Captured graphs do not, as the weights come back at other addresses.
"""

from collections.abc import Iterator

import torch
from torch import nn

from quire_engine.models.packed_values import tensors_of
from quire_engine.system.memory import available_memory_bytes


def weight_storages(model: object) -> list[torch.UntypedStorage]:
    """The storages of all parameters, buffers and packed weights, each once; none of what is no module."""
    tensors = _tensors(model) if isinstance(model, nn.Module) else ()
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({one.data_ptr(): one for one in storages if one.nbytes()}.values())


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        for value in vars(module).values():
            yield from tensors_of(value)


class HostWeights:
    """Copies the weights to host memory, and frees their storages.

    Args:
        model: whose.

    Raises:
        ValueError: the host has no memory for them. Nothing has changed.
    """

    def __init__(self, model: object) -> None:
        storages = [one for one in weight_storages(model) if one.resizable()]  # on a GPU all are
        num_bytes, free = sum(one.nbytes() for one in storages), available_memory_bytes()
        if num_bytes > free:
            raise ValueError(
                f"level is 1, which keeps the weights in host memory: they take {num_bytes >> 20} MiB, and "
                f"{free >> 20} MiB are free; set level to 2, or end what else uses it"
            )
        self._copies = [(one, _on_host(one)) for one in storages]
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self) -> None:
        """Copy them back. If there is no memory for all of them, none is there, and this may be called again."""
        try:
            for storage, copy in self._copies:
                storage.resize_(copy.nbytes())
                storage.copy_(copy)
        except BaseException:
            for storage, _ in self._copies:
                storage.resize_(0)
            raise


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    host.copy_(storage)
    return host
