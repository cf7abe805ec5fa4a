"""The plug-in for vLLM; nothing else in this package imports vLLM."""
