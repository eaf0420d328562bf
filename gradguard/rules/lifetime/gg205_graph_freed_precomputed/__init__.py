"""GG205 graph-freed-precomputed: the rule and the causes it tells apart."""
