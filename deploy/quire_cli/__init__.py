"""The `quire` command: serve, model, generate, doctor.

It starts other programs and tidies up after them; it knows nothing of how tokens are made. What it imports of the other
packages it imports late, so that `quire --help` answers at once.
"""

__all__: list[str] = []
