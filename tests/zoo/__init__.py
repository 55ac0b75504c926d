"""Architectures as they come from their libraries, tiny and random, under every transform at every stage."""
