"""For Hopper, in Gluon: two products of the expert MLP, the epilogue during the next product."""
