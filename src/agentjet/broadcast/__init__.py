"""One file from a learner to the hosts of all its engines at once, by collective operations in processes apart."""
