"""Files and folders on disk that appear whole or not at all, and can be checked byte by byte; knows no tensors."""
