//! Strings in, text and files out. The only place that prints.
