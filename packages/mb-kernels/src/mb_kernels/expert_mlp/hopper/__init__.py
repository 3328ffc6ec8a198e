"""Two products of the expert MLP in Gluon, for Hopper: the epilogue runs during the next one."""
