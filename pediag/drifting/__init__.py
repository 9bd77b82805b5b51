"""Measures from which position on precision breaks an encoding, lane by lane. Importing it imports no torch."""
