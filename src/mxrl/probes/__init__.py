"""Causal probes: which component of the 4-bit error breaks what, on any causal language model.

Read treatments.py (what is done to the model) and subject.py (to which model, on which prompts) first; then gradient,
temperature, deadzone, drift, fork, routing: each measures one failure and compares it with the theory; claims.py holds
what the paper (arXiv 2605.20402) says of each, and matrix.py puts all of it into one component × failure table.
"""
