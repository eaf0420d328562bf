"""GG407 function-contract: the rule and the causes it tells apart."""
