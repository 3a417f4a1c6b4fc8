"""What tests share: helpers, and processes, states and worlds to try things on. Import as `support.name`."""
