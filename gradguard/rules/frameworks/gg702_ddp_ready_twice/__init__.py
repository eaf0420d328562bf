"""GG702 ddp-ready-twice: the rule and the causes it tells apart."""
