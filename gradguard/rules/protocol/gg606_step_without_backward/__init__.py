"""GG606 step-without-backward: the rule and the causes it tells apart."""
