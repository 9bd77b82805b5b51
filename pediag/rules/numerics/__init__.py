"""Number formats: what they do to positions, frequencies and tables."""
