"""GG722 amp-scaler-misuse: the rule and the causes it tells apart."""
