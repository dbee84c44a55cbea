"""The layers that families share. Each is built of its options (`models/options.py`) for one rank."""
