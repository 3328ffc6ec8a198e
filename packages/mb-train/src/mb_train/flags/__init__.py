"""The command line: Megatron's flags, those of its forks, and what is refused."""
