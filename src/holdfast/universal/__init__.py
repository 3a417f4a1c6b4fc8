"""Foreign checkpoints: what other systems wrote, described so that the native path reads it."""
