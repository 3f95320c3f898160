"""Many measurements, one after the other, into one file."""
