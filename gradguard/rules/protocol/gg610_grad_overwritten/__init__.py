"""GG610 grad-overwritten: the rule and the causes it tells apart."""
