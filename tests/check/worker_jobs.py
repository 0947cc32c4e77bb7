"""Jobs for the tests of `workers`, in a module of their own that imports nothing heavy."""

import os
import signal
import time
from typing import Any


def work(job: Any) -> Any:
    """Do what the job says."""
    what, value = job
    if what == "sleep":
        time.sleep(value)
    elif what == "raise":
        raise ValueError(value)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        os._exit(value)
    elif what == "print":
        print(value, flush=True)
    elif what == "pid":
        return os.getpid()
    return value
