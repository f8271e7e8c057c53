"""The supervisor behind `pearl up` and `pearl demo`: starts a job's services as processes and keeps them running."""
