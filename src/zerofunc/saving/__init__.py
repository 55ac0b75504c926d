"""Checkpoints: what a run keeps, in a folder, from which any other run of the model can go on."""
