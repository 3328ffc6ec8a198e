"""From text to tokens on disk: inputs, workers that encode them, books of progress."""
