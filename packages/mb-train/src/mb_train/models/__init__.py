"""Models that `mb_train` trains."""
