"""Measure the machine in front of you: operators, blocks and whole models, through PyTorch.

`run.profile` does everything; `schema` says what it leaves behind. PyTorch and transformers are
imported inside functions only.
"""
