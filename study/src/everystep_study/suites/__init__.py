"""What is measured, one file per suite. ARCHITECTURE.md ("Measuring") says how to add one."""
