"""GG402 gradient-shape-mismatch: the rule and the causes it tells apart."""
