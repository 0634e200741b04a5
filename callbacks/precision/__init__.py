"""The parts of `AMP`: the precision plugin, submodules that stay in float32, and the count of skipped steps."""
