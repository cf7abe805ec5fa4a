"""The ``lmcache-ec`` command."""
