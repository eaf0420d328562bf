"""GG303 all-frozen: the rule and the causes it tells apart."""
