"""What is wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, and why."""
