"""OneLA: exact wide-beam decoding for generative recommenders."""

from onela._version import __version__

__all__ = ["__version__"]
