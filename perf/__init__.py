"""Benchmarks, and the lab they run in: many hosts with a slow network on one machine."""
