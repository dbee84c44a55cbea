"""Text that follows a grammar: compiled in a process of its own, matched in the engine core, applied as a bitmask.

A request without a grammar pays nothing.
"""
