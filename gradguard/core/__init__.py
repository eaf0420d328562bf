"""What every part of the package may import; it imports nothing of ours."""
