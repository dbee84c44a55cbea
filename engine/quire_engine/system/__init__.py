"""Processes and memory, as the operating system reports them, and how a child process is started."""
