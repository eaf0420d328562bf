"""The user's source: names, definitions, calls and blocks."""
