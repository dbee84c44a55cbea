"""Engines on other hosts, which join the front of a model over TCP.

::

    the front's host                                          another host (`quire join`)
    ReplicaSet ─┬─ LocalReplica ─► engine core 0
                └─ RemoteReplica ─ RemoteLink ─ Listener ◄═ TCP, CURVE ═ HeadlessEngine ─ LocalReplica ─► engine core 1

`wire`: what both sides say. `engine_digest`: whether both serve the same model. `listener`, `remote_replica`: the
front's side. `front_connection`, `headless`: the other.

A connection is one *session*: an engine joins, serves, and is gone when the connection ends, for whatever reason. The
requests that it had continue elsewhere from the journal, and it joins in a new session. So no message is lost within a
session, and none of an earlier one is taken for one of a later.
"""
