"""Computing again instead of keeping: activation checkpointing, and attention in blocks that are checkpointed."""
