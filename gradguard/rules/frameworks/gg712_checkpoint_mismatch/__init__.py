"""GG712 checkpoint-mismatch: the rule and the causes it tells apart."""
