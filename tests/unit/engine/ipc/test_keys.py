"""Files of keys: who may read them, what they hold, and that errors name the mend and never a secret."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from quire_engine.ipc.keys import add_peers, make_keys, read_keys


def test_a_new_file_is_its_owners_alone_and_gains_peers(tmp_path: Path) -> None:
    path, others = tmp_path / "keys.json", [make_keys().public_key.hex() for _ in range(2)]
    made = add_peers(path, [])
    assert path.stat().st_mode & 0o777 == 0o600
    assert add_peers(path, others[:1]).public_key == made.public_key, "what it holds stays"
    keys = add_peers(path, others)
    assert [peer.hex() for peer in keys.peers] == others
    assert read_keys(path) == keys
    assert made.secret_key.hex() not in repr(keys)
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.json"]


def test_what_is_wrong_with_a_file_is_said_with_its_mend(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def fails(match: str) -> None:
        with pytest.raises(ValueError, match=match) as raised:
            read_keys(path)
        assert secret not in str(raised.value)

    def write(**fields: Any) -> None:
        path.write_text(json.dumps({**content, **fields}))

    secret = "?"
    fails("is not there; make it with: quire keys host")
    add_peers(path, [])
    content = json.loads(path.read_text())
    secret = content["secret_key"]
    path.chmod(0o640)
    fails(r"can be read by others \(mode 640\); chmod 600 it")
    path.chmod(0o600)
    write(public_key=make_keys().public_key.hex())
    fails("its public_key does not belong to its secret_key")
    write(secret_key=secret[:-1])
    fails("secret_key in .* is no key; keys are 64 digits")
    write(peers=["x"])
    fails("one of the peers in .* is no key")
    write(more=1)
    fails("must hold public_key, secret_key and a list of peers")
    path.write_text(secret)
    fails("is not JSON|must hold")
    path.unlink()
    os.mkfifo(path, 0o600)
    holder = os.open(path, os.O_RDWR)  # or opening it to read would wait
    fails("is no regular file")
    os.close(holder)
    with pytest.raises(ValueError, match="the public key is no key"):
        add_peers(tmp_path / "new.json", ["abc"])
    assert not (tmp_path / "new.json").exists()
