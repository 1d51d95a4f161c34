"""What every other room needs. It knows no wrapper."""
