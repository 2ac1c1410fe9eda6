"""Observers of a registration: they read the values the stages return, and no stage knows them.

This room imports the stages, structlog and prometheus-client; never vLLM, LMCache or the orchestrator.
"""
