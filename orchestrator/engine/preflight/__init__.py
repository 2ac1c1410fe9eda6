"""What a vLLM engine would register, without weights, device or engine: vLLM's own planning, run on `meta` tensors.

`targets` are the machines that can be assumed, `assumed` makes vLLM believe it runs on one (with `stand_ins` for what only
that machine has), `ranks` gives one process every rank's place in the groups, and `plan` runs vLLM's own steps from flags
to registered caches. vLLM decides by the machine when it is first imported: one assumption a process.
"""
