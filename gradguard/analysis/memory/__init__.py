"""What holds memory: parameters, gradients, optimizer state, buffers, and what graphs have saved for backward."""
