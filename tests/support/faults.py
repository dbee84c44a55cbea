"""Faults for workers, as `quire_engine.worker.fault_injection` reads them."""

import json
from pathlib import Path
from typing import Any

__all__ = ["put_fault"]


def put_fault(file: Path, **fault: Any) -> None:
    """Put a fault there in one piece: workers look at every step, and never see half of it."""
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps(fault))
    aside.replace(file)
