"""A run's model put together on its ranks, with what runs it and what moves its weights."""
