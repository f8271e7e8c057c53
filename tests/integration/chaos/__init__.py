"""Real processes under real faults: a job on three "hosts", what a seed breaks there, and a report of how it recovered."""
