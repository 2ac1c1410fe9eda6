"""Benchmarks, one a file: each prints ratios against something measured in the same run. Nothing here is a test. `make bench`."""
