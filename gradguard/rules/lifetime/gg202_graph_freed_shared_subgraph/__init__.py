"""GG202 graph-freed-shared-subgraph: the rule and the causes it tells apart."""
