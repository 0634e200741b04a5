"""Causes of slow and broken runs, looked for one at a time; see `lit_data.commands.doctor`."""
