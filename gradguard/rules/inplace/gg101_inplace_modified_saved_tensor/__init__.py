"""GG101 inplace-modified-saved-tensor: the rule and the causes it tells apart."""
