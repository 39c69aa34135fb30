"""CPU schedules. Each module registers its rules on import."""

from tvmx_schedules.cpu import generic

__all__ = ["generic"]
