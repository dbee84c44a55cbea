"""The engine core, the process it runs in, and what is read of both from outside: heartbeat and journal."""
