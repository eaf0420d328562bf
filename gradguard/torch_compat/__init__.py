"""Private names of torch, each with its check and its fallback."""
