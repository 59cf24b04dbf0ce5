"""The version of the package, alone so that the command line can print it at once."""

__version__ = "0.3.0"
