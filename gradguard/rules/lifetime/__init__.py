"""Graph lifetime: a backward call needs saved values that an earlier one has let go."""
