"""Runs a failed step again, traced, and puts back what it changed."""
