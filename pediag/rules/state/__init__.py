"""What was built or stored."""
