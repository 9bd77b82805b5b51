"""Positional schemes side by side: one small decoder, trained on toy tasks, with each of them in turn."""
