"""Planning: the cost of a step on a cluster in time, memory and bytes, and the best decomposition."""
