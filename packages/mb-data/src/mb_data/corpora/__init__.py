"""Text that is there without a download."""
