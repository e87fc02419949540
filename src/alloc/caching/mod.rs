//! PyTorch caching allocator.
