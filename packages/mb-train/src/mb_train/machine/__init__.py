"""The machine and the process that a run is on."""
