"""Transports for messages between programs, over existing stores: a directory or a bucket.

This is the optimizer's part of pods that come and go. Which pods run, and where, is up to a
scheduler.
"""

from optax_wrappers.pods._directory import Directory
from optax_wrappers.pods._report import Report
from optax_wrappers.pods._rounds import OutOfStepError

__all__ = ["Directory", "OutOfStepError", "Report"]
