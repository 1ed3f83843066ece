"""Operators with a plain PyTorch reference each; imports torch (and triton) only."""
