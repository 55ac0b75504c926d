"""Processes: the groups that they form, the order that they agree on, and what they send from which memory."""
