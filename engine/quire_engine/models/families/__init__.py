"""Families of decoders: what each reads in `config.json`, and so which options of `models/decoder.py` it has.

A file here is free of torch, as the frontend reads checkpoints too, and imported when a checkpoint is of that family.
"""
