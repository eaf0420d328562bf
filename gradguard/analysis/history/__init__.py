"""What happened to one value: carried from step to step, cut off, switched."""
