import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))  # models and actors that several folders share
