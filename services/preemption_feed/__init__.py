"""The preemption feed: what takes GPUs away and brings them back, as events. Here: replay of availability traces."""
