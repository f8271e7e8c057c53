"""The checker: holds what agents, workers and the pipeline scheduler each wrote down against one another."""
