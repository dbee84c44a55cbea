"""What the operating system says of processes and memory, and how a child process is started."""
