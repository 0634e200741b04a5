"""From the command line to a configuration, and from its nodes to objects."""
