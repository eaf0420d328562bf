"""GG605 parameter-without-grad: the rule and the causes it tells apart."""
