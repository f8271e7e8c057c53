"""The rollout worker: one engine on a fixed set of GPUs, and its lifecycle."""
