"""The virtual environment of TRL's side, made on first use in the user's cache.

Invariant: an environment is named by what is installed in it, and used only once its installation has ended well.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from agentjet.pretrained.model_file import cache_folder

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
_READY = "ready"


def folder() -> Path:
    """Where the environment lies, or will."""
    text = f"{sys.version_info[:2]}".encode() + REQUIREMENTS.read_bytes() + CONSTRAINTS.read_bytes()
    return cache_folder().parent / "environments" / f"trl-{hashlib.sha256(text).hexdigest()[:12]}"


def python() -> Path:
    """The environment's interpreter; installs where that was not done. Takes a minute or two and about 2 GB."""
    place = folder()
    if not (place / _READY).is_file():
        print(f"installing TRL into {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-r", str(REQUIREMENTS), "-c", str(CONSTRAINTS)], check=True, stdout=sys.stderr)
        (place / _READY).touch()
    return place / "bin" / "python"
