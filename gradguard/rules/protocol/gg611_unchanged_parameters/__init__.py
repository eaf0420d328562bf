"""GG611 unchanged-parameters: the rule and the causes it tells apart."""
