"""Whether engines on two hosts keep KV blocks in the same place: what tells one such place from another.

Its path says nothing: folders of the same name may be different ones, and one may be mounted under two names. So a
folder has a file with a number of its own, which whoever looks for it first makes up. A store that is asked over TCP
shows that it has its secret key, so its public key stands for it.
"""

import contextlib
import os
import secrets
from pathlib import Path

from quire_engine.config import KVTransferConfig, TierConfig
from quire_engine.ipc.keys import read_keys

__all__ = ["STORE", "describe_store"]

STORE = "KV store"
"""What the description is called."""
NUMBER = "number"
"""The file in the folder."""


def describe_store(transfer: KVTransferConfig) -> dict[str, str]:
    """What has to be equal on all hosts whose engines load what others keep.

    Raises:
        ValueError: the folder cannot be read or written, or the keys of this host are not as they have to be.
    """
    return {STORE: ", ".join(_description_of(tier) for tier in transfer.tiers if tier.tier != "memory")}


def _description_of(tier: TierConfig) -> str:
    storage = tier.kv_connector_extra_config
    if tier.tier == "remote":
        keys = read_keys(Path(storage.key_file), "kv_transfer_config: key_file")
        return f"key {keys.peers[0].hex()}" if keys.peers else "nobody"
    try:
        return f"folder {_number_of(Path(storage.shared_storage_path))}"
    except OSError as error:
        raise ValueError(f"{tier.place_setting}, which cannot be used: {error}") from None


def _number_of(folder: Path) -> str:
    """The folder's own; it gets one if it has none. It appears whole, and of several that are made up one is taken."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / NUMBER
    if not path.exists():
        part = folder / f".{NUMBER}.{secrets.token_hex(4)}.tmp"
        part.write_text(secrets.token_hex(16))
        try:
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
        finally:
            part.unlink()
    return path.read_text()
