"""The state all actors share: the role table (pure: model, plan, invariants; I/O: store, watch)."""
