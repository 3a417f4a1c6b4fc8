"""Checkpoints of other systems, and what their libraries read in them."""
