//! GPUs by name, from their makers' data sheets.
//!
//! The one design decision: a data sheet's rate and what of it a job reaches are kept apart. Rates
//! stand here as published; [`GpuInfo::hardware`] multiplies them by [`Reached`], which is stated
//! once and is an assumption, not a measurement.

use super::{Dtype, Hardware};
use crate::units::{GIB, MIB};

/// What of a data sheet's rates a job reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reached {
    /// Of the matrix rate.
    pub flops: f64,
    /// Of the memory's bandwidth, in element-wise operations.
    pub memory: f64,
    /// Of the link's bandwidth, host to GPU, pinned.
    pub link: f64,
    /// Of the bandwidth between GPUs, in a collective.
    pub peer: f64,
}

/// Half of the matrix rate and eight tenths of every bandwidth. Assumptions, usual for large
/// transformers: they scale the times of a generated trace and no byte of it.
pub const REACHED: Reached = Reached { flops: 0.5, memory: 0.8, link: 0.8, peer: 0.8 };

/// A GPU as its data sheet has it. Rates are dense, one direction, decimal units a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuInfo {
    /// Name in job descriptions.
    pub name: &'static str,
    /// Name that CUDA reports.
    pub device: &'static str,
    /// Its memory in bytes: nominal, but for those whose reported total is known (H200 from our
    /// recordings, V100 from spec patrickstar 8.8).
    pub memory_bytes: u64,
    /// Operations a second of matrix products of 16 bits.
    pub flops_16: f64,
    /// The same of 32 bits, without TF32.
    pub flops_32: f64,
    /// Bytes a second of its memory.
    pub memory_bytes_per_s: f64,
    /// Bytes a second to or from the host over PCIe.
    pub link_bytes_per_s: f64,
    /// Bytes a second to other GPUs over NVLink.
    pub peer_bytes_per_s: f64,
    /// Memory of the host that such GPUs usually share, in bytes: DGX machines, and for the V100
    /// the host of PatrickStar's measurements (spec patrickstar 6.2).
    pub host_bytes: u64,
    /// Its 16-bit type for training.
    pub dtype: Dtype,
}

/// The GPUs that have a name. All are those for the SXM socket, eight to a host.
pub const GPUS: [GpuInfo; 5] = [
    GpuInfo {
        name: "h200",
        device: "NVIDIA H200",
        memory_bytes: 150_109_880_320,
        flops_16: 989e12,
        flops_32: 67e12,
        memory_bytes_per_s: 4800e9,
        link_bytes_per_s: 64e9,
        peer_bytes_per_s: 450e9,
        host_bytes: 2048 * GIB,
        dtype: Dtype::Bf16,
    },
    GpuInfo {
        name: "h100-80g",
        device: "NVIDIA H100 80GB HBM3",
        memory_bytes: 80 * GIB,
        flops_16: 989e12,
        flops_32: 67e12,
        memory_bytes_per_s: 3350e9,
        link_bytes_per_s: 64e9,
        peer_bytes_per_s: 450e9,
        host_bytes: 2048 * GIB,
        dtype: Dtype::Bf16,
    },
    GpuInfo {
        name: "a100-80g",
        device: "NVIDIA A100-SXM4-80GB",
        memory_bytes: 80 * GIB,
        flops_16: 312e12,
        flops_32: 19.5e12,
        memory_bytes_per_s: 2039e9,
        link_bytes_per_s: 32e9,
        peer_bytes_per_s: 300e9,
        host_bytes: 2048 * GIB,
        dtype: Dtype::Bf16,
    },
    GpuInfo {
        name: "a100-40g",
        device: "NVIDIA A100-SXM4-40GB",
        memory_bytes: 40 * GIB,
        flops_16: 312e12,
        flops_32: 19.5e12,
        memory_bytes_per_s: 1555e9,
        link_bytes_per_s: 32e9,
        peer_bytes_per_s: 300e9,
        host_bytes: 1024 * GIB,
        dtype: Dtype::Bf16,
    },
    GpuInfo {
        name: "v100-32g",
        device: "Tesla V100-SXM2-32GB",
        memory_bytes: 32_510 * MIB,
        flops_16: 125e12,
        flops_32: 15.7e12,
        memory_bytes_per_s: 900e9,
        link_bytes_per_s: 16e9,
        peer_bytes_per_s: 150e9,
        host_bytes: 240 * GIB,
        dtype: Dtype::Fp16,
    },
];

/// GPUs of one host, if nothing else is said.
pub const GPUS_PER_HOST: u64 = 8;

/// The GPU of that name.
pub fn gpu_named(name: &str) -> Option<&'static GpuInfo> {
    GPUS.iter().find(|gpu| gpu.name == name)
}

impl GpuInfo {
    /// What a job whose matrix products are of that type runs on: rates as [`REACHED`].
    pub fn hardware(&self, products: Dtype) -> Hardware {
        let flops = if products == Dtype::Fp32 { self.flops_32 } else { self.flops_16 };
        Hardware {
            gpu: self.device.to_owned(),
            gpu_bytes: self.memory_bytes,
            host_bytes: self.host_bytes,
            gpus_per_host: GPUS_PER_HOST,
            flops: flops * REACHED.flops,
            memory_bytes_per_s: self.memory_bytes_per_s * REACHED.memory,
            link_bytes_per_s: self.link_bytes_per_s * REACHED.link,
            peer_bytes_per_s: self.peer_bytes_per_s * REACHED.peer,
        }
    }
}
