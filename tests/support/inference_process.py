"""The inference actor, as if on another host, and held at a point on a version's way to it where one is asked for.

    python inference_process.py HOST POINT --config swarm.toml

POINT is one of `arriving_engine.POINTS`, or `-`. It tells `held` on its standard output.
"""

import socket
import sys

from arriving_engine import hold_at

from agentjet.actors.inference import run
from agentjet.actors.process import main

if __name__ == "__main__":
    _, host, point, *rest = sys.argv
    socket.gethostname = lambda: host
    if point != "-":
        hold_at(point)
    main("inference", run, needs_model=True, argv=rest)
