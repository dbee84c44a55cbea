"""The types that weights, activations, keys and values are quantised to."""

import torch

__all__ = ["LARGEST"]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Number of each type that the largest value is quantised to."""
