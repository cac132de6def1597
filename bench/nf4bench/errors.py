"""What ends the bench. Needs only Python."""


class WrongResult(Exception):
    """A candidate's result differs; the message says whose, from what, and by how much."""


class LibraryMissing(Exception):
    """The bench's C library cannot be loaded; the message says from where."""


class LaunchFailed(RuntimeError):
    """A kernel of the bench's C library could not be launched."""


class Refused(LaunchFailed):
    """A kernel that cannot do what it was asked."""
