"""The types that weights, activations, keys and values are quantised to."""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The number of each type that the largest absolute value is quantised to."""
