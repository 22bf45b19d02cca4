"""Records on the wire, ids, subjects and the codec: what a client in any language has to know."""
