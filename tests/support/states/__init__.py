"""States, arrays, memory and runs to try things on."""
