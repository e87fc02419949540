//! What PyTorch's kernels ask about a GPU before they decide how much scratch memory they need.

/// Facts about a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gpu {
    /// Streaming multiprocessors.
    pub(super) multiprocessors: u64,
    /// Workspace that PyTorch gives cuBLAS for each thread and stream: 32 MiB from Hopper on,
    /// 2 × 4 MiB and 16 × 8 KiB before (`CUBLAS_WORKSPACE_CONFIG`'s defaults).
    pub(super) cublas_workspace_bytes: u64,
    /// Fused attention runs on cuDNN: PyTorch's first choice from Hopper on.
    pub(super) cudnn_attention: bool,
}

/// Workspace of cuBLAS from Hopper on.
const HOPPER_WORKSPACE_BYTES: u64 = 32 << 20;
/// Workspace of cuBLAS before Hopper.
const WORKSPACE_BYTES: u64 = 2 * (4 << 20) + 16 * (8 << 10);

impl Gpu {
    /// The GPU of this name, as in "NVIDIA H200"; one that is not known counts as an A100.
    pub(super) fn named(name: &str) -> Gpu {
        let name = name.to_ascii_uppercase();
        let is = |names: &[&str]| names.iter().any(|known| name.contains(known));
        let (multiprocessors, hopper) = if is(&["B100", "B200", "B300"]) {
            (148, true)
        } else if is(&["H20", "H100", "H800"]) {
            (132, true)
        } else if is(&["V100"]) {
            (80, false)
        } else {
            (108, false)
        };
        let cublas_workspace_bytes = if hopper { HOPPER_WORKSPACE_BYTES } else { WORKSPACE_BYTES };
        Gpu { multiprocessors, cublas_workspace_bytes, cudnn_attention: hopper }
    }
}

/// Scratch memory of a sum of `rows` values into each of `outputs`, whose values lie side by side:
/// partial sums and semaphores, in bytes; nothing if blocks do not share an output. A model of
/// `setReduceConfig` in PyTorch's `Reduce.cuh`.
pub(super) fn column_sum_scratch(gpu: Gpu, rows: u64, outputs: u64) -> Option<[u64; 2]> {
    const THREADS: u64 = 512;
    const WARP: u64 = 32;
    const THREADS_PER_MULTIPROCESSOR: u64 = 2048;
    const VALUES_PER_THREAD: [u64; 2] = [16, 256];
    let vector = [4, 2, 1].into_iter().find(|vector| outputs.is_multiple_of(*vector))?;
    let columns = outputs / vector;
    let threads = THREADS / vector;
    let power = |value: u64| if value == 0 { 1 } else { 1 << value.min(threads).ilog2() };
    let height = power(rows).min(threads / power(columns).min(WARP));
    let width = power(columns).min(threads / height);
    let warps_share = rows >= (height * 16).min(VALUES_PER_THREAD[1]);
    let values = if warps_share { rows.div_ceil(height) } else { rows };
    let across = if warps_share { width } else { width * height };
    let grid = columns.div_ceil(across);
    let target = gpu.multiprocessors * (THREADS_PER_MULTIPROCESSOR / (width * height));
    if !warps_share || values < VALUES_PER_THREAD[1] || grid > target {
        return None;
    }
    let blocks = target
        .div_ceil(grid)
        .min(values.div_ceil(VALUES_PER_THREAD[0]))
        .max(values.div_ceil(VALUES_PER_THREAD[1]));
    if blocks < 2 {
        return None;
    }
    let partial = 4 * outputs.saturating_mul(blocks).saturating_mul(width * vector);
    Some([partial, 4 * grid])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worked by hand from the rules, for 16,384 rows of 2,048, 3,200 and 1,024 outputs.
    #[test]
    fn column_sums_share_outputs_between_blocks() {
        let h200 = Gpu::named("NVIDIA H200");
        // 512 vectors / 32 = 16 columns of blocks; 132 × 16 / 16 = 132 blocks share an output.
        assert_eq!(column_sum_scratch(h200, 16_384, 2048), Some([4 * 2048 * 132 * 128, 64]));
        assert_eq!(column_sum_scratch(h200, 16_384, 3200), Some([4 * 3200 * 85 * 128, 100]));
        assert_eq!(column_sum_scratch(h200, 16_384, 1024), Some([4 * 1024 * 256 * 128, 32]));
        assert_eq!(column_sum_scratch(h200, 256, 256), None);
    }

    #[test]
    fn gpus_are_known_by_their_names() {
        assert_eq!(Gpu::named("NVIDIA H200").cublas_workspace_bytes, 33_554_432);
        assert_eq!(Gpu::named("NVIDIA A100-SXM4-80GB").cublas_workspace_bytes, 8_519_680);
        assert_eq!(Gpu::named("Tesla V100-SXM2-32GB").multiprocessors, 80);
    }
}
