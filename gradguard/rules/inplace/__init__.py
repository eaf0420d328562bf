"""In-place rules (GG1xx): a value that the backward pass needs is written over, or may not be written at all."""
