"""What surrounds a method: its device, its public random numbers and its checkpoints.

Nothing in this folder may change a privacy claim.
"""

from privot.progress import Progress, ignore_progress
from privot.runtime.config import Runtime
from privot.runtime.streams import Streams
from privot.runtime.threads import use_threads

__all__ = ["Progress", "Runtime", "Streams", "ignore_progress", "use_threads"]
