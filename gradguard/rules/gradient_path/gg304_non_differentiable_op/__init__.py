"""GG304 non-differentiable-op: the rule and the causes it tells apart."""
