"""Reports of what-if runs: numbers over seeds, tables for a terminal, plots (SVG), one page (HTML) that needs nothing else."""
