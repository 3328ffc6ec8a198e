"""A run: set up, stepped to its end, measured and written down on the way."""

# The public API.
from mb_train.train.loop import Result as Result
from mb_train.train.loop import joined as joined
from mb_train.train.loop import train as train
