"""Slots, pools, cursors and pages: the memories of the running requests."""
