"""Communication of processes: semaphores, queues, meetings and locks in shared memory, and keys for TCP sockets."""
