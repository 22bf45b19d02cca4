"""Chat messages to exact token ids and back: templates, token-exact histories, tool calls; knows no torch."""
