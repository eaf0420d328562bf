"""GG504 vanishing-gradient: the rule and the causes it tells apart."""
