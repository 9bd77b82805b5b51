"""What stands behind :func:`pediag.watch`: what is watched, how it is measured, where it is written."""
