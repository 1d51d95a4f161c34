"""Stale gradients: those of parameters that have been updated since."""
