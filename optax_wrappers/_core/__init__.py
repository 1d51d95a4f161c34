"""What all other modules need. It depends on no wrapper."""
