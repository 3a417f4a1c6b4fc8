"""Processes: the command, scripts, documents, environments with other libraries."""
