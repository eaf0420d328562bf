"""GG502 nonfinite-backward: the rule and the causes it tells apart."""
