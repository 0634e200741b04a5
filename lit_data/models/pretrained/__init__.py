"""Nets of other libraries, with their weights, behind the inputs and outputs of our modules."""
