"""Messages between programs, carried by existing stores."""
