"""AgentJet trains the language models behind agents."""
