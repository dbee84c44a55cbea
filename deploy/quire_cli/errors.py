"""How a command fails: one line that names the cause and the mend."""

__all__ = ["CommandError", "UsageError"]


class CommandError(Exception):
    """Ends the command with exit code 1. The message is one line, "cause; mend"."""

    exit_code = 1


class UsageError(CommandError):
    """What was typed cannot be meant; ends the command with exit code 2."""

    exit_code = 2
