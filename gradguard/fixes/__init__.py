"""Fixes: source rewrites for the user's files."""
