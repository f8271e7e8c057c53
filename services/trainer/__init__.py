"""The trainer: GRPO by FSDP2 on finished batches; checkpoints, then snapshots, then news of them."""
