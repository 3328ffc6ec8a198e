"""What a stranger may put into a file, to see that nothing of it is run."""


class Attack:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called
