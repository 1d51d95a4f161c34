"""Workers that own their parameters, and their synchronization."""
