"""What carries messages between programs, over stores that exist: a directory, or a bucket.

The optimizer's half of pods that come and go. Who is alive, and where it runs, is for a scheduler.
"""

from optax_wrappers._transports._directory import Directory, OutOfStepError, Report

__all__ = ["Directory", "OutOfStepError", "Report"]
