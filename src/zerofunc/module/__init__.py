"""A module that is sharded: what is admitted, with which first values, and what keeps parameters and shards equal."""
