"""Whether positions survive decoding, padding and packing."""
