"""Toggle manager (paper 4.6): executes a plan's part in the overlap zone and tells the trainer when to train."""
