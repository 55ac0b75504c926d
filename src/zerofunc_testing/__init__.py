"""A pool of rank processes for tests, and the pytest marker that runs a test's body on each of them."""
