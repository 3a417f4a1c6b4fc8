"""Programs that the suite ``convert`` runs: `timed_command`, `restoring_rank` and `zero_writer`."""
