"""Templates of job scripts, and what is particular to a site."""
