"""Parts of a report: what a run folder holds, and its page; see `lit_data.app.report`."""
