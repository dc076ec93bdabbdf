"""The foundation: the grid, errors, files, settings; and all use of torch's private interfaces, in one module."""
