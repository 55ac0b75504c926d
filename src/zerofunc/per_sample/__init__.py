"""Per-sample gradients, streamed: taps on parameters, rules for layers, and what is made of them."""
