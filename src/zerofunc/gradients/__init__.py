"""From the local gradients of a backward to mean gradients in shards, and what a parameter shows of them."""
