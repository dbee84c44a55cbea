"""The engine core, the process it runs in, and the clients that talk to it."""
