"""The one exception for what the user got wrong; the command line turns it into a sentence and exit code 2."""


class InputError(ValueError):
    """Bad input: the message names the thing, the rule and the value, in one sentence."""
