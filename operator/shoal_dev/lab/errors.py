"""What the lab tells its user instead of a traceback."""


class LabError(Exception):
    """The message is for the user: what is wrong, and what to do."""
