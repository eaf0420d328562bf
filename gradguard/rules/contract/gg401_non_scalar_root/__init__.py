"""GG401 non-scalar-root: the rule and the causes it tells apart."""
