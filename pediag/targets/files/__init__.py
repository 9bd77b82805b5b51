"""Files that hold tensors or a program, one module or folder a format."""
