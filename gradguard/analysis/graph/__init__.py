"""The live autograd graph: nodes, saved values, results computed again."""
