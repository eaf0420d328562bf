"""Answers questions about the user's program, its live objects, the graph, a value's history and what ran."""
