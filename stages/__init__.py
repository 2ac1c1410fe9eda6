"""The four stages of a registration: pure functions from one frozen value to the next.

This room imports torch and the standard library, and in `transfer.py` anyio. It knows neither vLLM nor LMCache,
writes no log and counts nothing: a stage returns the next value or raises what it refuses.
"""
