"""Families of decoders: each a file that reads its model (`models/options.py`) from `config.json`, with ::

    read_options(fields) -> ModelOptions    raises CheckpointError if the model cannot be served
    DEFAULTS                                optional: fields that are missing, where not all families have the same

The files do not import torch, as the frontend reads checkpoints too. Each is imported only for its family's
checkpoints.
"""
