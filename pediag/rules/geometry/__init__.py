"""Whether a scheme is the map that it claims to be."""
