"""Closed forms: bytes, memory and time of a step from sizes alone, for one decomposition or for arrays of them."""
