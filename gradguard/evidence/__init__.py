"""Evidence: what rules read facts into: the live graph, names, source."""
