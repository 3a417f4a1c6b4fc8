"""Tests against other systems, which run in the environments of `make peers`."""
