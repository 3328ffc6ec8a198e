"""What a run will need, reckoned before it is started."""
