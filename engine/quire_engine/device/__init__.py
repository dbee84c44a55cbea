"""The device that a rank computes on, and transfers of tensors to and from it."""
