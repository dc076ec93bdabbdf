"""What everything else stands on: the grid, errors, files, settings; and torch's private interfaces, in one module."""
