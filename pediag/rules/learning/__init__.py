"""What training did with positions."""
