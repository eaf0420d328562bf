"""GG302 detached: the rule and the causes it tells apart."""
