"""GG707 ranks-out-of-step: the rule and the causes it tells apart."""
