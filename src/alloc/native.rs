//! One device malloc per tensor.
