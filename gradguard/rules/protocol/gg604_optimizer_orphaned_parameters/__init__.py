"""GG604 optimizer-orphaned-parameters: the rule and the causes it tells apart."""
