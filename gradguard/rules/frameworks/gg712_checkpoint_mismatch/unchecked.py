"""What `determinism_check="none"` does and does not do. Part of GG712."""

UNCHECKED = (
    '`determinism_check="none"`: it only leaves out the comparison of shapes and dtypes; too few saved tensors raise all the same, and '
    "where nothing raises, backward computes with other values than forward did"
)
