"""What every wing needs, and which knows no wrapper."""
