"""The HTTP gateway of a router process: OpenAI's and SGLang's interfaces, and sessions that become trajectories."""
