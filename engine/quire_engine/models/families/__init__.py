"""Families of decoders. Each reads its options of `models/decoder.py` from `config.json`.

The files here do not import torch, as the frontend reads checkpoints too. Each is imported only for its family's
checkpoints.
"""
