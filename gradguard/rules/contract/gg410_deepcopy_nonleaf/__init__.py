"""GG410 deepcopy-nonleaf: the rule and the causes it tells apart."""
