"""Workers that own their parameters, and what they exchange."""
