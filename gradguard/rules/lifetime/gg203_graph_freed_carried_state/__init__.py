"""GG203 graph-freed-carried-state: the rule and the causes it tells apart."""
