"""From text to tokens on disk: inputs, workers that encode them, bookkeeping of what is done."""
