"""Kinds of data and work that nobody needs to open who does not use them. The rooms beside this one import no wing."""
