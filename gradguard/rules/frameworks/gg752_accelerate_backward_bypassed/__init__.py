"""GG752 accelerate-backward-bypassed: the rule and the causes it tells apart."""
