"""Signatures of other engines over this package's ops: change one import, keep the call."""
