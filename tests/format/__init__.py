"""Tests of the format floor: what is written can be read, and nothing else can."""
