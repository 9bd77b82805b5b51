"""Exported programs (.pt2): checked, read and run without what PyTorch would evaluate."""
