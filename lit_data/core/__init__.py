"""Parts that all packages use: errors, checks, types, random numbers, grids, files, devices and batches."""
