"""Planted defects: each is one change of the source that tests must notice. `make test-mutants` tries them all."""
