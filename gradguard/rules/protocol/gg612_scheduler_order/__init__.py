"""GG612 scheduler-order: the rule and the causes it tells apart."""
