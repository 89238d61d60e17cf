"""Text that people read and write: lines, numbers, units, missing extras."""
