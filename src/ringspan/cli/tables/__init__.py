"""What commands print of plans."""
