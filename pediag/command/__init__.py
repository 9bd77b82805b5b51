"""What stands behind the command line: options, several targets at once, the gate, fixes, what is printed."""
