"""What a run's log is drawn as: curves, pages, the frontier."""
