"""Device code that the ops share: tiles, memory, activations."""
