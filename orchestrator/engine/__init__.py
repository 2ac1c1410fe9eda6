"""The engine's border: vLLM's own objects in, `stages.model` values out.

`observe` makes an Offer of what a worker hands over, `compat` holds what vLLM's releases spell differently, and `edits`
offers the stages under the names and signatures that LMCache's connector calls.
"""
