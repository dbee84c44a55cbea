"""What the worker remembers of its requests, and what a step needs of that."""
