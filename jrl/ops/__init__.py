"""Numbers in, numbers out: returns, losses, distributions, running statistics."""
