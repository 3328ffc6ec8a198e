"""A run's folder: what is where, who holds it, files that are whole or not there. No torch."""
