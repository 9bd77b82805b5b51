"""What torch.save writes, read without unpickling."""
