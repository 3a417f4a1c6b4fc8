"""One module per system, which says where the bytes of its checkpoints lie."""
