"""GG602 zeroed-before-step: the rule and the causes it tells apart."""
