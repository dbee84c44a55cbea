"""The files of a server are its user's alone, also where it opens them to all."""

import subprocess
import sys
from pathlib import Path

from quire_cli.private_memory import keep_memory_private

# As tritonserver makes a region: the mode is set once more, past the umask.
MAKE = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
os.fchmod(descriptor, 0o644)
print(oct(os.fstat(descriptor).st_mode & 0o777))
os.fchmod(descriptor, 0o640)
print(oct(os.fstat(descriptor).st_mode & 0o777))
"""


def test_a_region_is_private_from_the_beginning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(tmp_path / "region")],
        preexec_fn=keep_memory_private, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0o600", "0o640"], "only what tritonserver does is not done"
