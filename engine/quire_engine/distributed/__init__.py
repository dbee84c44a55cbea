"""What ranks say to each other during a step: sums, shards put together, activations handed on."""

from quire_engine.distributed.communicator import Communicator, ParallelState

__all__ = ["Communicator", "ParallelState"]
