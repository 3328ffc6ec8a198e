"""What the rooms need of the host: registration of ops, launches, facts of the device."""
