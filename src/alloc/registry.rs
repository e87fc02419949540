//! Which allocators there are: one line each.

/// What `fraglab list` says about an allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatorInfo {
    /// Name on the command line.
    pub name: &'static str,
    /// One line about it.
    pub summary: &'static str,
    /// Parameters: key and one line.
    pub params: Vec<(&'static str, &'static str)>,
}

/// Every allocator.
pub fn list() -> Vec<AllocatorInfo> {
    Vec::new()
}
