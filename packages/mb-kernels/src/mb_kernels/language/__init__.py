"""Device code that the rooms share: tiles, memory, activations."""
