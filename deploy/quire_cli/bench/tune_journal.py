"""The journal of `quire tune`: one JSON line per run, so that a search that was interrupted goes on where it was.

::

    {"search": {"model": …, "slo": …, …}}                       the first line: what is searched
    {"settings": {…}, "rate": 4.0, "share": 0.98, …}            a run: the share of requests that met the objectives
    {"settings": {…}, "error": "…"}                             settings that cannot be served

A line that is cut off, as when the machine went down, is passed over.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_cli.errors import CommandError, UsageError


class Journal:
    """Runs by settings and rate.

    Args:
        path: of the file, which is made when it does not exist.
        search: what is searched; a file of another search is refused.

    Raises:
        CommandError: the file cannot be read or written.
        UsageError: it is no journal, or one of another search.
    """

    def __init__(self, path: Path, search: Mapping[str, Any]) -> None:
        self._path = path
        self._runs: dict[str, dict[str, Any]] = {}
        lines = self._read()
        if not lines:
            self._append({"search": dict(search)})
        elif not isinstance(lines[0], dict) or "search" not in lines[0]:
            raise UsageError(f"--journal {path} is no journal of quire tune; choose another file")
        elif lines[0]["search"] != json.loads(json.dumps(search)):
            differs = [name for name in search if lines[0]["search"].get(name) != search[name]]
            raise UsageError(f"--journal {path} is of a search with another {', '.join(differs)}; choose another file")
        for line in lines[1:]:
            if isinstance(line, dict) and isinstance(line.get("settings"), dict):
                self._runs[_key(line["settings"], line.get("rate"))] = line
        self.num_known = len(self._runs)
        """Runs that were there already."""

    def find(self, settings: Mapping[str, Any], rate: float) -> dict[str, Any] | None:
        """The run of these settings at this rate, or their error; None if there is neither."""
        return self._runs.get(_key(settings, rate)) or self._runs.get(_key(settings, None))

    def add(self, run: Mapping[str, Any]) -> None:
        """Keep a run: it is on the disk when this returns."""
        self._runs[_key(run["settings"], run.get("rate"))] = dict(run)
        self._append(run)

    def _read(self) -> list[Any]:
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        except (OSError, ValueError) as error:
            raise CommandError(f"--journal {self._path} cannot be read: {error}") from None
        return [_parsed(line) for line in text.splitlines()]

    def _append(self, entry: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a+b") as file:
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # of a line that was cut off
                        file.write(b"\n")
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CommandError(f"--journal {self._path} cannot be written: {error.strerror}") from None


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _key(settings: Mapping[str, Any], rate: float | None) -> str:
    return json.dumps([settings, None if rate is None else f"{rate:.6g}"], sort_keys=True)
