"""Text of a server, for a terminal."""


def printable(text: str) -> str:
    r"""Escape all that is invisible, as Python does: ESC becomes `\x1b`, a line's end `\n`. Tabs stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode() for one in text)
