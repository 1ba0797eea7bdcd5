"""The version, for modules that everything rests on."""

__version__ = "0.1.0.dev0"
