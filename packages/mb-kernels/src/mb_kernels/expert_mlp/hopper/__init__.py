"""The two products of the expert MLP whose epilogue runs beside the next product, in Gluon."""
