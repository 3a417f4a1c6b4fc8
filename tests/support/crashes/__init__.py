"""Crashes, failing calls and power cuts, and what must hold after them."""
