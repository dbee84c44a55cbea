"""How processes of one machine wake and tell each other: a semaphore and a queue in shared memory."""
