"""Adapters for training loops and frameworks. Each imports its framework late, so that none of them is required."""
