"""GG102 inplace-optimizer-step: the rule and the causes it tells apart."""
