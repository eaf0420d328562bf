"""GG5xx: numbers that stop being numbers, gradients that explode or vanish."""
