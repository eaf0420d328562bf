"""GG404 dtype-mismatch: the rule and the causes it tells apart."""
