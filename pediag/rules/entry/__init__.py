"""Where and how positions meet content."""
