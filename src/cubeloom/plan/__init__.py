"""Planning: what a step costs on a cluster, in time, memory and bytes, and which decomposition is best."""
