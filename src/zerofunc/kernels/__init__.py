"""Kernels whose derivatives are right: which operator is composed of elementary ones, when, and how."""
