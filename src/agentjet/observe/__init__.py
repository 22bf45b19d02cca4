"""What an actor says about itself: logs, metrics, and how late its event loop is."""
