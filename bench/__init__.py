"""Benchmarks that print ratios against something measured in the same run; nothing here is a test. `make bench`."""
