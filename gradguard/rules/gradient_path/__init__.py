"""Gradient path (GG3xx): the loss, or a part of it, has no path back to the parameters."""
