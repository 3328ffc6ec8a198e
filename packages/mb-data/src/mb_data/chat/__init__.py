"""Conversations: a model's own template around their turns, and which tokens are learned."""
