"""The speculative decoding method: draft, verify, accept."""
