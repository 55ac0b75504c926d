"""From a data set to the batches of this rank, and from a batch to a loss."""
