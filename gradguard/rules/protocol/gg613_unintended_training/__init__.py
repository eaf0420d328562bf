"""GG613 unintended-training: the rule and the causes it tells apart."""
