"""Random modules and random programs over them, run sharded and in plain PyTorch, and compared.

A case is a function of a seed (`cases.draw`). Its text (`printing.text`) is a program that stands alone: the harness,
the module, the sharding and the steps. The ranks run that very text, so that what is printed is what failed.
"""
