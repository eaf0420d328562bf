"""GG408 hook-contract: the rule and the causes it tells apart."""
