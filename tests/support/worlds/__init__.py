"""Several ranks, real and simulated, and the layouts of what they train."""
