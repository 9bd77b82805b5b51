"""What of an output is owed to positions and what to tokens, and what attention looks at: from a real forward pass."""
