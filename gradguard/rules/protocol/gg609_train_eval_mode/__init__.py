"""GG609 train-eval-mode: the rule and the causes it tells apart."""
