"""Measures training steps of Tessera beside PyTorch's own ways to shard: `python -m tessera.bench --help`."""
