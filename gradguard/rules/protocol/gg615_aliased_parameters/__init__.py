"""GG615 aliased-parameters: the rule and the causes it tells apart."""
