"""Tests of the format layer: what is written can be read, and nothing else can."""
