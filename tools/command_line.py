"""What the command lines here have in common: how they say what is wrong."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """What an error says, for :meth:`argparse.ArgumentParser.error`."""
    # A KeyError's text is the representation of its argument.
    reason = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(reason).split()) or type(error).__name__
