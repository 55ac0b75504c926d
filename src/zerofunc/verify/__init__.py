"""The table of transforms and stages, measured against plain PyTorch."""
