"""Host code that the ops share: their registration, launches, properties of the device."""
