"""Crashes of shelves, and fits that are killed."""
