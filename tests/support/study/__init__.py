"""Frameworks and results that are made up, for the study's tests."""
