"""Importers that rebuild the tidy tables of measurements from where they were published."""

from .aiconfigurator import import_aiconfigurator
from .llmservingsim import import_llmservingsim
from .neusight import import_neusight
from .tables import merge_tables, write_tables
from .vidur import import_vidur

__all__ = [
    "import_aiconfigurator",
    "import_llmservingsim",
    "import_neusight",
    "import_vidur",
    "merge_tables",
    "write_tables",
]
