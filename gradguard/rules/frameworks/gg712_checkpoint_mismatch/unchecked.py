"""What `determinism_check="none"` does and does not do. Part of GG712."""

UNCHECKED = (
    '`determinism_check="none"`: it leaves out the comparison of shapes and dtypes alone; another number of saved tensors raises all the '
    "same, and where nothing raises the gradients are wrong"
)
