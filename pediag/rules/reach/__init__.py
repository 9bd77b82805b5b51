"""What happens at the length asked about."""
