"""What PyTorch's caching allocator reserves and a trainer cannot use: `python -m benchmarks.allocator`."""
