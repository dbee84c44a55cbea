"""How a command fails: with one line that names the cause and the fix."""

import os


class CommandError(Exception):
    """Ends the command with exit code 1. The message is one line, "cause; fix"."""

    exit_code = 1


class UsageError(CommandError):
    """Wrong usage; ends the command with exit code 2."""

    exit_code = 2


def has_working_directory() -> bool:
    """False when the directory that this process is in has been deleted, so that relative paths lead nowhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
