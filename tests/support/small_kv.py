"""`mstar-daemon` whose ranks hold KV for one sequence of max_seq, so that several at once preempt each other.

Run it as `python tests/support/small_kv.py FLAGS…`; its ranks are this file too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    if "--shm-fd" in sys.argv:
        from mstar.ranks import memory, worker

        memory.CPU_KV_CAP_BYTES = 0
        os._exit(worker.main())
    from mstar.daemon import supervisor
    from mstar.daemon.cli import main

    supervisor.DEFAULT_COMMAND = (sys.executable, str(Path(__file__).resolve()))
    main()
