"""Python code and live models."""
