"""Variables that are kept in a set."""
