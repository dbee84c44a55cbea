"""ExpertLoad: how many tokens each expert of each layer was sent so far, in shared memory; ExpertCounters: who writes.

::

    layer 0   │ expert 0 │ expert 1 │ …    int64 each; zeros in a layer without experts
    layer 1   │ …                          a rank that counts writes the layers of its stage, and no others

The kernels that route tokens count them. On the CPU they do that right here: the engine core reads the numbers when it
likes, and no step says a word of them.
"""

import os

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.ipc.semaphore import SharedMemory
from quire_engine.models.decoder import Decoder

__all__ = ["ExpertCounters", "ExpertLoad"]

PUBLISHED_STEPS = 32
"""On a GPU the numbers are copied every so many steps: hundreds of kilobytes for a large model."""


class ExpertLoad:
    """One process's view of the memory.

    Args:
        shape: layers and experts.
        descriptor: the memory's, inherited; unset: allocates new memory.
    """

    def __init__(self, shape: tuple[int, int], descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = SharedMemory.create("quire-expert-load", 8 * shape[0] * shape[1])
        self.descriptor = descriptor
        self._memory = SharedMemory(descriptor)
        self.tokens: npt.NDArray[np.int64] = np.frombuffer(self._memory.view, dtype=np.int64).reshape(shape)
        """[layers, experts]; a token counts once for each of its experts."""

    def close(self) -> None:
        """Close this process's descriptor; the memory stays mapped as long as something refers to `tokens`."""
        os.close(self.descriptor)


class ExpertCounters:
    """Has the layers of a model count.

    Args:
        load: where the numbers go.
        model: its layers with experts are told where to count.
        device: of the model.
    """

    def __init__(self, load: ExpertLoad, model: Decoder, device: torch.device) -> None:
        mixtures = model.mixtures
        self._numbers = list(mixtures)
        self._load = load
        self._steps = 0
        self._copied: torch.cuda.Event | None = None
        if device.type == "cpu":
            for number, mixture in mixtures.items():
                mixture.counts_X = torch.from_numpy(load.tokens[number])
            return
        shape = (len(mixtures), load.tokens.shape[1])
        self._on_device = torch.zeros(shape, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for mixture, counts_X in zip(mixtures.values(), self._on_device, strict=True):
            mixture.counts_X = counts_X

    def reset(self) -> None:
        """Begin again at 0."""
        self._load.tokens[self._numbers] = 0
        if self._copied is not None:
            self._on_device.zero_()
            self._on_host.zero_()

    def publish(self) -> None:
        """Call it after each step. On a GPU it begins to copy the numbers now and then, and takes over what came."""
        if self._copied is None:
            return
        self._steps += 1
        if self._steps % PUBLISHED_STEPS == PUBLISHED_STEPS // 2 and self._copied.query():  # type: ignore[no-untyped-call]
            self._load.tokens[self._numbers] = self._on_host.numpy()
        if self._steps % PUBLISHED_STEPS == 0 and self._copied.query():  # type: ignore[no-untyped-call]
            self._on_host.copy_(self._on_device, non_blocking=True)
            self._copied.record()
