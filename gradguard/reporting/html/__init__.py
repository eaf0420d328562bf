"""The diagnosis as HTML."""
