"""Activations of rows between two products, where no product's epilogue does them."""
