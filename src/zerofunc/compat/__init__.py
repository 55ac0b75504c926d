"""Other libraries' names over zerofunc's own."""
