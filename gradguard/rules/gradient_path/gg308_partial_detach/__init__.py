"""GG308 partial-detach: the rule and the causes it tells apart."""
