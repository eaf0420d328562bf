"""GG603 optimizer-missing-parameters: the rule and the causes it tells apart."""
