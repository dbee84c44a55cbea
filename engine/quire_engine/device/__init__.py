"""Which device a rank computes on, and how tensors get there and back."""
