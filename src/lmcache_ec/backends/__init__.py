"""Tiers of storage: memory, disk and remotes."""
