"""Parts that every room uses: errors, checks, types, random numbers, grids, files, devices and batches of any form."""
