"""GG405 device-mismatch: the rule and the causes it tells apart."""
