"""The pipeline scheduler: the asynchronous RL loop of groups, staleness, batches and policy versions."""
