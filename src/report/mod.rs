//! Formats results.
