"""The parts of a report: what a run folder holds, and how it is shown; see `lit_data.commands.report`."""
