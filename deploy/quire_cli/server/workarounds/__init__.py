"""What single releases of tritonserver need besides: a module for each, imported only for a server of that release."""

from pathlib import Path
from typing import TYPE_CHECKING

from quire_cli.server.tritonserver import Release

if TYPE_CHECKING:
    from quire_cli.server.workarounds.triton_2_51 import Triton251


_FIRST_WITHOUT = (2, 69)
"""26.05, the first that has the last of the fixes which `triton_2_51` names. The workarounds do no harm before."""


def workarounds_for(release: Release | None, folder: Path) -> "Triton251 | None":
    """The workarounds for a server; None for one that needs none.

    Args:
        release: the server's; None: it is not known, and may be an old one.
        folder: where the processes of its models have their status pages.
    """
    if release is not None and release >= _FIRST_WITHOUT:
        return None
    from quire_cli.server.workarounds.triton_2_51 import Triton251

    return Triton251(folder)
