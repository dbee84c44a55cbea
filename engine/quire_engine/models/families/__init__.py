"""Families of decoders and encoders. A family is a function that reads a model (`models/options.py`) from the fields of
`config.json`, and raises CheckpointError if the model cannot be served. `DEFAULTS` of its file has, by family, the
fields that may be missing and whose default is not that of all families.

The files do not import torch, as the frontend reads checkpoints too.
"""
