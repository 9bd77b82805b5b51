"""What the config says."""
