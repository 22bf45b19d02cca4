"""The curriculum: which tasks are played when, who may play them, and when the run is over."""
