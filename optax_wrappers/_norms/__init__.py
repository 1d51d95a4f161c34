"""Constraints: variables that stay in a set."""
