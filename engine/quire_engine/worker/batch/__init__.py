"""The worker's state of its requests, and the inputs of a step."""
