"""GG721 amp-unscale: the rule and the causes it tells apart."""
