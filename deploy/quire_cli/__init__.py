"""The `quire` command: serve, model, generate, doctor.

It starts other programs and cleans up after them; it knows nothing of how tokens are generated. It imports the other
packages late, so that `quire --help` is fast.
"""

__all__: list[str] = []
