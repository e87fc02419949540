//! Data parallelism without sharding, as `DistributedDataParallel` does it: gradients are summed
//! over ranks in buckets, which are there beside the gradients all the time.
//!
//! ```text
//!   wrap     weights broadcast in flat copies, one after the other
//!            one bucket for all gradients
//!   step 1   buckets of 25 MiB in the order in which gradients came, the first of 1 MiB
//! ```
//!
//! Buckets are summed while the backward pass runs, so that their time is not the job's.

use super::cx::{Cx, ParamRef};
use super::emitter::Tensor;
use super::job::Job;
use crate::trace::Role;

/// Size from which a flat copy of weights is full.
const BROADCAST_BYTES: u64 = 250 << 20;
/// Size from which the first bucket is full: it goes out early.
const FIRST_BUCKET_BYTES: u64 = 1 << 20;
/// Size from which another bucket is full.
const BUCKET_BYTES: u64 = 25 << 20;

/// One bucket for all gradients, until it is known in which order they come.
pub(super) struct FirstBucket {
    /// The bucket.
    all: Tensor,
    /// Sizes in bytes of the gradients that have come, in their order.
    pub(super) sizes: Vec<u64>,
}

/// Wraps a model that is loaded, if the job has several ranks that do not shard it.
pub(super) fn wrap(cx: &mut Cx, job: &Job) {
    if job.parallel.data < 2 || job.strategy.zero > 0 {
        return;
    }
    let params = cx.params();
    let bytes = |param: &ParamRef| param.held.borrow().as_ref().map_or(0, |held| held.bytes());
    let sizes: Vec<u64> = params.iter().map(bytes).collect();
    let mut before = None;
    for flat in full(&sizes, BROADCAST_BYTES, BROADCAST_BYTES) {
        // A weight by itself is sent as it is.
        if flat.len() > 1 {
            let copy = bucket(cx, &flat);
            cx.receive(copy.bytes());
            before = Some(copy);
        }
    }
    drop(before);
    let trained = params.iter().filter(|param| param.trainable);
    let trained: Vec<u64> = trained.map(bytes).collect();
    cx.first_bucket = Some(FirstBucket { all: bucket(cx, &trained), sizes: Vec::new() });
}

/// A forward pass begins: once gradients have come, their order is known.
pub(super) fn before_forward(cx: &mut Cx) {
    if cx.first_bucket.as_ref().is_none_or(|first| first.sizes.is_empty()) {
        return;
    }
    if let Some(FirstBucket { all, sizes }) = cx.first_bucket.take() {
        drop(all);
        for sizes in full(&sizes, FIRST_BUCKET_BYTES, BUCKET_BYTES) {
            let bucket = bucket(cx, &sizes);
            cx.buffers.push(bucket);
        }
    }
}

fn bucket(cx: &mut Cx, sizes: &[u64]) -> Tensor {
    cx.new_tensor_of("bucket", sizes.iter().sum(), Role::Communication)
}

/// Sizes in groups, each closed when it is full: the first of them at another size than the rest.
fn full(sizes: &[u64], first_bytes: u64, bytes: u64) -> Vec<Vec<u64>> {
    let mut groups: Vec<Vec<u64>> = Vec::new();
    let (mut group, mut limit_bytes) = (Vec::new(), first_bytes);
    for size in sizes {
        group.push(*size);
        if group.iter().sum::<u64>() >= limit_bytes {
            groups.push(std::mem::take(&mut group));
            limit_bytes = bytes;
        }
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_close_when_they_are_full() {
        let groups = full(&[1, 4, 10, 10, 11, 2], 5, 20);
        assert_eq!(groups, [vec![1, 4], vec![10, 10], vec![11, 2]]);
        assert!(full(&[], 5, 20).is_empty());
    }
}
