"""Communication of ranks during a step: all-reduce, gather, and activations sent to the next stage."""

from quire_engine.distributed.communicator import Communicator, ParallelState

__all__ = ["Communicator", "ParallelState"]
