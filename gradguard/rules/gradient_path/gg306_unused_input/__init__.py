"""GG306 unused-input: the rule and the causes it tells apart."""
