"""What commonly hurts a run, looked for one thing at a time; see `lit_data.commands.doctor`."""
