"""GG706 ddp-unsynchronized: the rule and the causes it tells apart."""
