"""The one exception that a user is meant to read: what is wrong, with which value, and what to do about it.

Lowest package, so that ops, algorithm and command line raise the same type; the command line prints it as
`error:` and `hint:` and exits with 2. Anything else that escapes is a defect of ours.
"""


class CometError(Exception):
    """Bad input. `message` names the thing and its value; `hint` says what would make it work (may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n{hint}")
        self.message = message
        self.hint = hint
