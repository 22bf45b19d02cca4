"""The command line: thin commands over the packages below, each imported only when it is called."""
