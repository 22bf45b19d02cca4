"""What an actor says about itself: logs, and how late its event loop is."""
