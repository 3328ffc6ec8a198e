"""Activations of rows as ops of their own, where they are no part of a matrix product."""
