"""NATS for a job: the server's configuration, keys and process, and who may say what on it."""
