"""Text that follows a grammar: compiled in a process of its own, matched in the engine core, applied as a bitmask.

Nothing here is imported, started or paid for before the first request that asks for it.
"""
