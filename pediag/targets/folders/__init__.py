"""Folders: the transformers layout, adapters, original layouts, and code beside weights."""
