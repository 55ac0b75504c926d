"""Parameter space: the module as a function of its shards, and the linear maps between shards and full tensors."""
