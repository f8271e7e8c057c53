"""Node agent (paper 5, worker lifecycle): launches, supervises, fences and ends the processes of one node."""
