"""GG204 graph-freed-accumulated-loss: the rule and the causes it tells apart."""
