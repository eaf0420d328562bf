"""The diagnosis as text."""
