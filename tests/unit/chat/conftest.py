import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `chat_models` holds what the tests of this folder share
