"""Tests of foreign checkpoints: what other systems wrote is read exactly, and nothing in it is run."""
