"""The scheduler: chooses what runs in the next step. Knows tokens and blocks, never tensors."""
