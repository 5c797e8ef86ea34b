"""Training: data, optimizer state, the compiled step, and the loop around it."""
