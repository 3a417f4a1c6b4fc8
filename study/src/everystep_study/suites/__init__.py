"""What is measured, one file per suite. CONTRIBUTING.md ("Measuring") says how to add one."""
