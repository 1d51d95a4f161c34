"""Messages between programs, carried by stores that exist."""
