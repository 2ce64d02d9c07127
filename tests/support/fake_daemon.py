"""`mstar-daemon` as a process of its own, with fake ranks: `python -m tests.support.fake_daemon SCRIPT FLAGS…`."""

from __future__ import annotations

import json
import sys

from mstar.daemon import supervisor
from mstar.daemon.cli import main
from tests.support import fake_rank

if __name__ == "__main__":
    supervisor.DEFAULT_COMMAND = tuple(fake_rank.command(**json.loads(sys.argv.pop(1))))
    main()
