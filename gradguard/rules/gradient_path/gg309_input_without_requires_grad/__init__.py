"""GG309 input-without-requires-grad: the rule and the causes it tells apart."""
