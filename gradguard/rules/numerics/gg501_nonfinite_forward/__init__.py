"""GG501 nonfinite-forward: the rule and the causes it tells apart."""
