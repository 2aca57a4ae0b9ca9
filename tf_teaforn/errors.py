"""The one exception that stands for a mistake a user can mend."""


class UserError(Exception):
    """Input, flags or files that cannot be used.

    The message is one line: what is wrong, where (file, line, flag) and what to do. Command-line
    programs print it and exit with code 2.
    """
