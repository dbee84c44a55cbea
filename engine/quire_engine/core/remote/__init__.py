"""Engines on other hosts, which join the front of a model over TCP.

::

    the front's host                                          another host (`quire serve --headless`)
    DataParallelClient ─┬─ SupervisedClient ─► engine core 0
                        └─ RemoteReplica ── Listener ◄═ TCP, CURVE ═ HeadlessEngine ── AsyncMPClient ─► engine core 1

`keys`: who may talk to whom. `wire`: what they say. `engine_digest`: whether both sides serve the same model.
`listener`, `remote_connection`, `remote_replica`: the front's side. `front_connection`, `headless_engine`: the other.

A connection is one *session*: an engine joins, serves, and is gone when the connection ends, for whatever reason. The
requests that it had go on elsewhere from the journal, and it joins in a new session. So no message is ever lost within
one, and none of an earlier one is taken for one of a later.
"""
