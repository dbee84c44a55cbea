"""What single releases of tritonserver need besides: a module for each, imported only for a server of that release."""

from pathlib import Path
from typing import TYPE_CHECKING

from quire_cli.tritonserver import Release

if TYPE_CHECKING:
    from quire_cli.workarounds.triton_2_51 import Triton251


def workarounds_for(release: Release | None, folder: Path, *, needs_stub: bool) -> "Triton251 | None":
    """The workarounds for a server; None for one that is newer than all that need some.

    Args:
        release: the server's; None: it is not known, and may be an old one.
        folder: where the processes of its models have their status pages.
        needs_stub: whether one of the models that are loaded at the start certainly runs in Python.
    """
    if release is not None and release > (2, 51):
        return None
    from quire_cli.workarounds.triton_2_51 import Triton251

    return Triton251(folder, needs_stub=needs_stub)
